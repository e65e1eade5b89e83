"""Running sequences move from one engine to another one with their pages, on the fake model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.kv_window import KVWindow
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_terms import Service, Targets
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.reservations import Reservation
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.simulate.virtual_clock import VirtualClock
from tests.support.engine.fake_engine import make_engine, request, run, tokens
from tests.support.engine.fake_runner import NAN, PAGE_SIZE, FakeRunner, continuation
from tests.support.engine.oracle import give_drafts
from tests.support.engine.windows import windowed_answer

PROMPT = [1 + index % 40 for index in range(70)]


class Pair:
    """Two engines with runners of their own. A test carries the pages itself."""

    def __init__(self, **limits: int) -> None:
        self.runners = FakeRunner(), FakeRunner()
        self.source = make_engine(self.runners[0])
        self.target = make_engine(self.runners[1], **limits)  # type: ignore[arg-type]
        self.deltas: list[TokenDelta] = []

    def running(self, *, num_tokens: int, **params: object) -> Sequence:
        """Lets a request run at the source until it has so many tokens."""
        self.source.add(request("a", PROMPT, **params))
        while sum(len(delta.token_ids) for delta in self.deltas) < num_tokens:
            self.deltas += self.source.step()
        (sequence,) = self.source.moving.running
        return sequence

    def carry(self, reservation: Reservation, table: list[int], places: range) -> None:
        reservation.sent.update(places)
        for place in places:
            if table[place]:
                page = reservation.table[place]
                self.runners[1].slots[page] = list(self.runners[0].slots[table[place]])
                reservation.arrived.add(place)

    def move(self, sequence: Sequence) -> Reservation:
        """Moves a sequence that runs at the source to the target."""
        reservation = self.target.moving.reserve(sequence, may_wait=True)
        assert reservation is not None
        self.check()
        assert self.source.moving.can_depart(sequence)
        kept = self.source.moving.depart(sequence)
        self.check()
        num_pages = -(-sequence.num_computed_tokens // PAGE_SIZE)
        self.carry(reservation, kept.table, range(reservation.num_shared, num_pages))
        self.target.moving.arrive(reservation, kept.hidden)
        self.source.moving.drop(kept, is_verified=True)
        self.check()
        return reservation

    def check(self) -> None:
        self.source.check_integrity()
        self.target.check_integrity()

    def finish(self) -> list[int]:
        """Runs both engines until they are idle; returns the whole answer."""
        for engine in (self.source, self.target):
            self.deltas += run(engine).get("a", [])
        return tokens(self.deltas)


@pytest.mark.parametrize("num_tokens", [1, 9, 10, 11, 12, 30])
def test_a_sequence_goes_on_in_another_engine_and_computes_nothing_again(num_tokens: int) -> None:
    pair = Pair()
    pair.move(pair.running(num_tokens=num_tokens, max_tokens=40))
    assert not pair.source.has_work
    assert pair.finish() == continuation(PROMPT, 40)
    assert pair.runners[1].num_computed_tokens == 40 - num_tokens


def test_full_pages_stay_in_the_source_and_join_the_tree_of_the_target() -> None:
    pair = Pair()
    pair.move(pair.running(num_tokens=4, max_tokens=8))
    pair.finish()
    for engine in (pair.source, pair.target):
        engine.add(request("b", [*PROMPT, 3], max_tokens=1))
        (delta,) = run(engine)["b"]
        assert delta.num_cached_tokens >= 64


def test_only_the_pages_that_the_target_lacks_are_reserved() -> None:
    pair = Pair()
    pair.target.add(request("b", PROMPT, max_tokens=2))
    run(pair.target)
    before = pair.target.stats().load.num_free_pages
    reservation = pair.move(pair.running(num_tokens=3, max_tokens=20))
    assert reservation.arrived == {4}
    assert before - pair.target.stats().load.num_free_pages == 5, "idle pages are not free any more"
    assert pair.finish() == continuation(PROMPT, 20)


def test_a_reserved_seat_is_not_given_to_a_waiting_request() -> None:
    pair = Pair(max_num_seqs=1)
    sequence = pair.running(num_tokens=2, max_tokens=12)
    reservation = pair.target.moving.reserve(sequence, may_wait=True)
    assert reservation is not None
    pair.target.add(request("b", PROMPT[:20], max_tokens=2))
    pair.target.step()
    assert pair.target.num_running == 0 and pair.target.num_waiting == 1
    pair.target.moving.close(reservation, keeps_pages=True)
    pair.target.step()
    assert pair.target.num_running == 1
    assert pair.target.moving.reserve(sequence, may_wait=True) is None, "no seat is left"
    pair.finish()


def test_a_request_that_waits_and_came_first_has_the_first_claim_to_a_seat() -> None:
    pair = Pair(max_num_seqs=2)
    sequence = pair.running(num_tokens=2, max_tokens=12)
    early, late = (Sequence(number, request(f"w{number}", PROMPT[:9])) for number in (-1, 99))
    pair.target.adopt(late)
    assert (first := pair.target.moving.reserve(sequence, may_wait=True)) is not None
    pair.target.moving.close(first, keeps_pages=False)
    pair.target.adopt(early)
    assert (second := pair.target.moving.reserve(sequence, may_wait=True)) is not None
    pair.target.step()
    assert [each.id for each in pair.target.moving.running] == [99], "in order of arrival there"
    pair.target.moving.close(second, keeps_pages=False)
    pair.target.adopt(Sequence(-2, request("w-2", PROMPT[:9])))
    assert pair.target.moving.reserve(sequence, may_wait=True) is None
    pair.finish()


def test_reserved_pages_are_not_free_for_anyone_else() -> None:
    pair = Pair(num_pages=10)
    sequence = pair.running(num_tokens=2, max_tokens=12)
    reservation = pair.target.moving.reserve(sequence, may_wait=True)
    assert reservation is not None and pair.target.stats().load.num_free_pages == 5
    pair.target.add(request("b", [9] * 90, max_tokens=2))
    pair.target.step()
    assert pair.target.num_running == 0
    pair.check()
    pair.target.moving.close(reservation, keeps_pages=True)
    assert tokens(run(pair.target)["b"]) == continuation([9] * 90, 2)


def test_a_reservation_grows_with_its_sequence_or_says_that_it_cannot() -> None:
    pair = Pair(num_pages=10)
    sequence = pair.running(num_tokens=2, max_tokens=80)
    reservation = pair.target.moving.reserve(sequence, may_wait=True)
    assert reservation is not None
    while sequence.num_tokens < 80:
        pair.source.step()
    assert pair.target.moving.extend(reservation, may_wait=True) and len(reservation.table) == 6
    pair.target.add(request("b", [9] * 60, max_tokens=2, ignore_eos=True))
    pair.target.step()
    while sequence.num_tokens < 96:
        pair.source.step()
    assert not pair.target.moving.extend(reservation, may_wait=True)
    pair.check()
    pair.target.moving.close(reservation, keeps_pages=False)


def test_pages_that_arrived_are_found_after_a_reservation_ended_and_others_are_wiped() -> None:
    pair = Pair()
    sequence = pair.running(num_tokens=2, max_tokens=12)
    reservation = pair.target.moving.reserve(sequence, may_wait=True)
    assert reservation is not None
    pair.carry(reservation, sequence.page_table, range(3))
    reservation.sent.add(3)  # a parcel that failed has written to it
    pair.runners[1].slots[reservation.table[3]] = [NAN] * PAGE_SIZE
    pair.target.moving.close(reservation, keeps_pages=True)
    pair.target.add(request("b", PROMPT, max_tokens=3))
    deltas = run(pair.target)["b"]
    assert deltas[0].num_cached_tokens == 48 and tokens(deltas) == continuation(PROMPT, 3)
    assert pair.runners[1].cleared == [reservation.table[3]]
    pair.finish()


def test_a_sequence_that_cannot_arrive_goes_on_at_the_source_without_computing_again() -> None:
    pair = Pair()
    kept = pair.source.moving.depart(sequence := pair.running(num_tokens=5, max_tokens=20))
    assert not pair.source.moving.has(sequence) and not pair.source.has_work
    pair.check()
    assert pair.source.moving.take_back(kept)
    assert pair.finish() == continuation(PROMPT, 20)
    assert pair.runners[0].num_computed_tokens == len(PROMPT) + 19


def test_a_sequence_without_a_seat_to_go_back_to_finds_its_prefix() -> None:
    pair = Pair()
    sequence = pair.running(num_tokens=5, max_tokens=20)
    kept = pair.source.moving.depart(sequence)
    for index in range(8):
        pair.source.add(request(f"b{index}", [index + 1] * 4, max_tokens=3))
    pair.source.step()
    assert not pair.source.moving.take_back(kept)
    pair.source.moving.drop(kept, is_verified=False)
    sequence.leave_engine()
    pair.source.adopt(sequence)
    assert pair.finish() == continuation(PROMPT, 20)


def test_no_step_begins_ahead_with_a_sequence_that_leaves() -> None:
    pair = Pair()
    sequence = pair.running(num_tokens=3, max_tokens=20)
    pair.source.moving.announce(sequence)
    pair.source.begin_step()
    assert not pair.source.begin_ahead()
    pair.source.moving.retract(sequence)
    assert pair.source.begin_ahead()


def test_what_still_reads_its_prompt_cannot_leave() -> None:
    pair = Pair()
    pair.source = make_engine(pair.runners[0], budget=16)
    pair.source.add(request("a", PROMPT))
    pair.source.step()
    (sequence,) = pair.source.moving.running
    assert not pair.source.moving.can_depart(sequence)
    while sequence.num_output_tokens == 0:
        pair.deltas += pair.source.step()
    assert pair.source.moving.can_depart(sequence)
    pair.source.abort("a")
    assert not pair.source.moving.can_depart(sequence)


def test_a_waiting_sequence_is_released_also_after_a_preemption() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, num_pages=10, max_num_seqs=2)
    engine.add(request("a", PROMPT, max_tokens=60))
    engine.add(request("b", [5] * 60, max_tokens=60))
    deltas: list[TokenDelta] = []
    while not any(each.num_preemptions for each in engine.moving.waiting):
        deltas += engine.step()
    (sequence,) = engine.moving.waiting
    other = make_engine(FakeRunner())
    other.adopt(engine.moving.release(sequence))
    for each in (engine, other):
        deltas += itertools.chain(*run(each).values())
    assert {d.request_id: d.finish_reason for d in deltas if d.finish_reason} == {
        "a": FinishReason.LENGTH,
        "b": FinishReason.LENGTH,
    }
    assert tokens([d for d in deltas if d.request_id == "b"]) == continuation([5] * 60, 60)


@pytest.mark.parametrize("num_tokens", [1, 5, 20, 40, 55])
def test_a_sequence_takes_only_the_pages_along_that_it_still_sees(num_tokens: int) -> None:
    window = KVWindow(window=20, sinks=4)
    pair = Pair()
    sequence = pair.running(num_tokens=num_tokens, max_tokens=60, kv_window=window)
    reservation = pair.move(sequence)
    assert pair.finish() == windowed_answer(PROMPT, 60, window)
    assert len(reservation.arrived) <= (6 if num_tokens < 20 else 4)


def test_it_can_move_again_and_again() -> None:
    pair = Pair()
    sequence = pair.running(num_tokens=3, max_tokens=40)
    for _ in range(4):
        pair.move(sequence)
        pair.deltas += pair.target.step()
        pair.source, pair.target = pair.target, pair.source
        pair.runners = pair.runners[::-1]
    assert pair.finish() == continuation(PROMPT, 40)


def test_a_sequence_leaves_without_the_pages_of_its_drafts() -> None:
    pair, answer = Pair(), continuation(PROMPT, 40)
    for engine in (pair.source, pair.target):
        give_drafts(engine, Oracle({"a": answer}, 0.6, lengths=(1, 8), vocab_size=50))
    sequence = pair.running(num_tokens=9, max_tokens=40)
    pair.move(sequence)
    assert pair.finish() == answer


def test_a_strict_deadline_goes_along_to_an_engine_whose_steady_clock_differs() -> None:
    clock = VirtualClock()
    pair = Pair()
    tiers = (TierConfig(name="gold", e2e_s=90.0),)
    scheduler = SchedulerConfig(max_num_seqs=4, max_batched_tokens=64, tiers=tiers)
    policy = ServicePolicy(scheduler, lambda: clock.now)
    before, after = ServiceState(policy), ServiceState(policy)
    pair.source, pair.target = (
        Engine(
            LocalExecutor(runner, Sampler(frozenset())),
            scheduler=scheduler,
            num_pages=40,
            micro_batches=1,
            max_model_len=160,
            eos_token_ids=frozenset(),
            clock=lambda: clock.now,
            service=state,
        )
        for runner, state in zip(pair.runners, (before, after), strict=True)
    )
    targets = Targets(e2e_s=90.0, is_strict=True)
    service = Service(tier="gold", tenant="t", targets=targets)
    pair.source.add(replace(request("a", PROMPT, max_tokens=30), service=service))
    for _ in range(4):
        pair.deltas += pair.source.step()
        before.turn(has_work=True)
        clock.advance_to(clock.now + 20.0)  # the source leaves most of such a pause out
    (sequence,) = pair.source.moving.running
    standing = sequence.standing
    assert standing is not None and policy.num_strict == 1
    assert abs(before.steady() - after.steady()) > 10.0
    left_s = standing.last_due_s - before.steady()
    pair.move(sequence)
    assert standing.last_due_s - after.steady() == pytest.approx(left_s)
    assert policy.num_strict == 1
    assert pair.finish() == continuation(PROMPT, 30)
    assert policy.num_strict == policy.shares.num_open == 0
