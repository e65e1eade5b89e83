"""Prompts are read in one cell and continued in another one: on ranks, the answers are those of one
process, bit by bit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import pytest

from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.messages import Report, RunStep
from moe_serve.cluster.control.parcel_messages import TakePages
from moe_serve.cluster.ranks.attention_rank import AttentionRank
from moe_serve.cluster.ranks.shard_parcels import TAKES_PARCELS, ParcelTaker, ShardParcels
from moe_serve.config.sections import CacheConfig, EngineConfig
from moe_serve.engine.request.request import GenerationRequest
from tests.support.cluster.cells_drive import (
    cells_config,
    check_nothing_is_held,
    in_one_process,
    serving_cells,
    wait_until_whole,
)
from tests.support.cluster.layouts import Answer, requests, serve
from tests.support.sampled_cases import EVERY_CASE

pytestmark = pytest.mark.timeout(400)
VOCAB_SIZE = 4096  # of the demonstration model
_LONGEST_S = 100.0
WANTED = requests(8, VOCAB_SIZE, num_tokens=10)
CASES = [
    ("1x(1A1E prefill) 1x(1A1E decode)", False, "shared"),
    ("1x(1A1E prefill) 1x(1A2E tp2 decode)", True, "auto"),
    ("1x(1A1E tp2 prefill) 1x(2A1E decode)", False, "tcp"),
]
if EVERY_CASE:
    CASES += [
        (f"1x(1A1E tp{reader} prefill) 1x(1A1E tp{writer} decode)", is_layered, "auto")
        for reader, writer, is_layered in product((1, 2, 4), (1, 2, 4), (False, True))
    ]


def layered(of: EngineConfig) -> EngineConfig:
    """Prompts pass groups of layers, not chunks."""
    scheduler = replace(of.scheduler, layered_prefill="on", max_batched_tokens=48)
    return replace(of, scheduler=scheduler)


@pytest.mark.parametrize(("layout", "is_layered", "link"), CASES)
def test_answers_are_those_of_one_process(layout: str, is_layered: bool, link: str) -> None:
    """Greedy and seeded, with log probabilities and penalties, cold and warm."""
    of = cells_config(layout, link=link)
    of = layered(of) if is_layered else of
    if link == "tcp":  # one memory tier for shards that hold other parts of a page
        cache = replace(of.cache, memory_tier_bytes=16 * 2**20, checkpoint_after_s=0.0)
        of = replace(of, cache=cache)
    expected = in_one_process(replace(of, cache=CacheConfig(num_pages=256)), WANTED)
    with serving_cells(of) as engine:
        assert serve(engine, WANTED) == expected
        wait_until_whole(engine)
        moves, tier = engine.stats().moves, engine.stats().tier
        assert (tier is not None and tier.num_pages > 0) is (link == "tcp")
        assert moves is not None and moves.ended.get(("hand_over", "done"), 0) > 0, f"{moves}"
        assert moves.num_failed_parcels == moves.num_recomputed_tokens == 0, f"{moves}"
        assert serve(engine, WANTED) == expected, "warm"
        wait_until_whole(engine)
        check_nothing_is_held(engine)


def test_a_drained_cell_loses_its_requests_and_computes_nothing_again() -> None:
    of = cells_config("2x(1A1E)")
    wanted = [replace(each, params=replace(each.params, max_tokens=100)) for each in WANTED[:6]]
    expected = in_one_process(of, wanted)
    short = in_one_process(of, WANTED[:6])
    with serving_cells(of) as engine:
        answers = {each.request_id: Answer() for each in wanted}
        for each in wanted:
            engine.add(each)
        drained = None
        while any(answer.end is None for answer in answers.values()):
            for delta in engine.step():
                answers[delta.request_id].take(delta)
            if drained is None and all(len(a.token_ids) >= 4 for a in answers.values()):
                # Requests may have moved already, because the steps of one cell were longer.
                loads = [cell.load.num_running for cell in engine.stats().cells]
                drained = loads.index(max(loads))
                engine.drain(drained, is_draining=True)
        assert answers == expected
        assert drained is not None, "all had a token before the last one ended"
        wait_until_whole(engine)
        stats = engine.stats()
        assert stats.moves is not None and stats.moves.ended.get(("drain", "done"), 0) > 0
        assert stats.moves.num_recomputed_tokens == 0
        num_steps = stats.cells[drained].num_steps
        assert serve(engine, WANTED[:6]) == short
        assert engine.stats().cells[drained].num_steps == num_steps, "it was given a request"
        engine.drain(drained, is_draining=False)
        check_nothing_is_held(engine)


def test_aborts_leave_nothing_behind() -> None:
    """At every moment of a hand-over, in any cell."""
    of = cells_config()
    with serving_cells(of) as engine:
        ends: dict[str, object] = {}
        for number in range(12):
            each = replace(long_request(number), request_id=f"a{number}")
            engine.add(each)
            for _ in range(number):
                ends |= {d.request_id: d.finish_reason for d in engine.step()}
            engine.abort(each.request_id)
        wait_until_whole(engine)
        for delta in engine.step():
            ends[delta.request_id] = delta.finish_reason
        check_nothing_is_held(engine)


class HeldParcels:
    """Holds each parcel while a rank takes it, until `may_end` says so of the rank's thread."""

    def __init__(self, patch: pytest.MonkeyPatch, may_end: Callable[[HeldParcels, str], bool]):
        self._changed = threading.Condition()
        self.steps = Counter[str]()  # that ranks have ended, by thread
        self.num_held = self.num_waits = 0  # parcels; orders that waited for one
        load, run, settle = ShardParcels.load, AttentionRank._run, ParcelTaker.settle

        def load_later(shard: ShardParcels, order: TakePages) -> str:
            rank = threading.current_thread().name.removesuffix(TAKES_PARCELS)
            with self._changed:
                self.num_held += 1
                assert self._changed.wait_for(lambda: may_end(self, rank), _LONGEST_S)
            return load(shard, order)

        def run_noted(rank: AttentionRank, order: RunStep) -> Report:
            report = run(rank, order)
            with self._changed:
                self.steps[threading.current_thread().name] += 1
                self._changed.notify_all()
            return report

        def settle_noted(taker: ParcelTaker, pages: Iterable[int]) -> None:
            named = set(pages)
            with self._changed:
                self.num_waits += any(not named.isdisjoint(p) for p in taker._pages.values())
                self._changed.notify_all()
            settle(taker, named)

        patch.setattr(ShardParcels, "load", load_later)
        patch.setattr(AttentionRank, "_run", run_noted)
        patch.setattr(ParcelTaker, "settle", settle_noted)


def step_until(engine: CellsEngine, is_done: Callable[[], bool]) -> dict[str, Answer]:
    """Returns what was answered until then."""
    answers, end = dict[str, Answer](), time.monotonic() + _LONGEST_S
    while not is_done():
        assert time.monotonic() < end, f"{engine.stats().moves}"
        for delta in engine.step():
            answers.setdefault(delta.request_id, Answer()).take(delta)
    return answers


def test_a_cell_goes_on_generating_while_it_takes_a_parcel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parcel is held until its rank has ended two more steps, of another request."""
    begun: dict[int, int] = {}

    def after_two_steps(held: HeldParcels, rank: str) -> bool:
        first = begun.setdefault(held.num_held, held.steps[rank])
        return held.steps[rank] >= first + 2

    of, wanted = cells_config(), replace(long_request(3), request_id="long")
    expected = in_one_process(of, [wanted])
    held = HeldParcels(monkeypatch, after_two_steps)
    with serving_cells(of) as engine:
        stream = replace(WANTED[1], request_id="stream", prompt_token_ids=(5, 6, 7))
        stream = replace(stream, params=replace(stream.params, max_tokens=1500))
        engine.add(stream)
        step_until(engine, lambda: engine.stats().cells[1].num_steps > 2)
        answer = Answer()
        engine.add(wanted)
        while answer.end is None:
            for delta in engine.step():
                assert delta.request_id == "long" or delta.finish_reason is None, "it was too short"
                if delta.request_id == "long":
                    answer.take(delta)
        assert answer == expected["long"]
        engine.abort("stream")
        wait_until_whole(engine)
        moves = engine.stats().moves
        assert moves is not None and moves.ended == {("hand_over", "done"): 1}, f"{moves}"
        assert moves.num_failed_parcels == 0 and held.num_held > 1 and held.num_waits == 0
        check_nothing_is_held(engine)


def test_pages_of_an_aborted_parcel_are_not_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parcel is held until a step of the next requests, which get its pages, waits for it."""
    of = cells_config()
    wanted = [replace(each, prompt_token_ids=(7, *range(index, 20))) for index, each in
              enumerate(requests(3, VOCAB_SIZE, num_tokens=40))]  # fmt: skip
    expected = in_one_process(of, wanted)
    held = HeldParcels(monkeypatch, lambda held, rank: held.num_waits > 0)
    with serving_cells(of) as engine:
        engine.add(replace(long_request(3), request_id="long"))
        step_until(engine, lambda: held.num_held > 0)
        engine.abort("long")
        ends = step_until(engine, lambda: not engine.has_work)
        assert ends["long"].end is not None and held.num_waits == 0
        assert serve(engine, wanted) == expected
        assert held.num_waits > 0, "no step waited"
        wait_until_whole(engine)
        check_nothing_is_held(engine)


def long_request(seed: int) -> GenerationRequest:
    each = requests(12, VOCAB_SIZE, num_tokens=40)[seed]
    prompt = (each.prompt_token_ids * 90)[:80]
    return replace(each, prompt_token_ids=tuple((t + seed) % VOCAB_SIZE for t in prompt))
