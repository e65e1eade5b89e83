"""Pages from a store, on the fake model: each answer checks the pages it was computed from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule import store_loads
from moe_serve.engine.schedule.page_tiers import PageAccess, PageTiers
from tests.support.engine.fake_engine import request, run, tokens
from tests.support.engine.fake_runner import PAGE_SIZE, FakeRunner, continuation
from tests.support.engine.fake_store import FakeStore
from tests.support.engine.timed_store import SetClock, TimedRunner, TimedStore
from tests.support.sampled_cases import EVERY_CASE

PROMPT = [1 + index % 40 for index in range(100)]
NUM_FULL = 99 // PAGE_SIZE


@pytest.fixture(scope="module", autouse=True)
def every_page_at_once() -> Iterator[None]:
    """Pages of loads that run are taken one by one, as the prompts here have few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_loads, "_LEAST_ENTERED", 1)
        yield


class ManualClock:
    """A clock that moves by `tick` whenever it is read."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def access(runner: FakeRunner) -> PageAccess:
    def read(page: int, into: NDArray[np.uint8]) -> None:
        into[:] = runner.slots[page]

    def write(page: int, data: NDArray[np.uint8]) -> None:
        runner.slots[page] = data.tolist()

    return PageAccess(read, write, runner.page_size)


def engine_with(
    store: FakeStore, runner: FakeRunner, clock: Clock | None = None, num_pages: int = 64
) -> Engine:
    clock = ManualClock() if clock is None else clock

    def make(cache: PrefixCache) -> PageTiers:
        return PageTiers(cache, store, access(runner), clock)

    return Engine(
        LocalExecutor(runner, Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
        num_pages=num_pages,
        page_size=runner.page_size,
        micro_batches=1,
        max_model_len=160,
        eos_token_ids=frozenset(),
        make_tier=make,
        clock=clock,
    )


@pytest.mark.parametrize("num_aborted", [1, 2, 3])
def test_pages_of_an_aborted_prompt_are_not_cleared_after_a_load(num_aborted: int) -> None:
    store = FakeStore()
    run_once = engine_with(store, FakeRunner())
    run_once.add(request("first", PROMPT))
    assert tokens(run(run_once)["first"]) == continuation(PROMPT, 10)
    run_once.close()
    engine = engine_with(store, FakeRunner(), num_pages=20)
    for index in range(num_aborted):
        engine.add(request(f"b{index}", [50 + index] * 100))
        engine.step()
        engine.abort(f"b{index}")
    engine.add(request("second", PROMPT))
    assert tokens(run(engine)["second"]) == continuation(PROMPT, 10)
    assert store.loads, "the pages came from the store"


def filled() -> FakeStore:
    """Returns a store with the pages of PROMPT and its answer."""
    store = FakeStore()
    engine = engine_with(store, FakeRunner())
    engine.add(request("a", PROMPT))
    run(engine)
    engine.close()
    return store


def test_full_pages_are_stored_with_their_parents() -> None:
    store = filled()
    assert len(store.pages) == (100 + 10 - 1) // PAGE_SIZE, "a partial page is not stored"
    children = {parent: key for key, parent in store.parents.items()}
    roots = store.parents.values() - store.pages.keys()
    assert len(roots) == 1 and len(children) == len(store.pages), "the pages form one chain"


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_a_new_engine_starts_with_the_stored_pages(delay: int) -> None:
    store = filled()
    store.delay = delay
    runner = FakeRunner()
    engine = engine_with(store, runner)
    engine.add(request("b", PROMPT))
    answer = run(engine)["b"]
    assert tokens(answer) == continuation(PROMPT, 10)
    assert runner.num_computed_tokens == 100 + 9 - NUM_FULL * PAGE_SIZE
    assert answer[0].num_cached_tokens == NUM_FULL * PAGE_SIZE
    stats = engine.stats().tier
    assert stats is not None and stats.hit_tokens == NUM_FULL * PAGE_SIZE


def test_pages_are_taken_while_the_rest_is_read() -> None:
    store, runner = filled(), FakeRunner()
    store.delay = NUM_FULL  # a page with each step
    engine = engine_with(store, runner)
    engine.add(request("a", PROMPT))
    counts = []
    while not runner.num_computed_tokens:
        engine.step()
        engine.check_integrity()
        stats = engine.stats().tier
        assert stats is not None
        counts.append(stats.hit_tokens // PAGE_SIZE)
    assert counts == [0, *range(NUM_FULL + 1)], "a page with each step"
    assert tokens(run(engine)["a"]) == continuation(PROMPT, 10)[1:]


def test_pages_that_become_known_at_once_are_copied_in_several_steps() -> None:
    store = FakeStore()
    engine = engine_with(store, FakeRunner(), num_pages=400)
    engine.add(request("long", [41], max_tokens=140))
    for number in range(4):
        engine.add(request(f"{number}", [40 - number, *PROMPT], max_tokens=2))
    counts = [0]
    while engine.has_work:
        engine.step()
        counts.append(len(store.pages))
    in_step = [after - before for before, after in itertools.pairwise(counts)]
    assert max(in_step[:-1]) == 4, "those of the prompts are copied in several steps"
    assert in_step[-1] == 140 // PAGE_SIZE, "an empty step delays nothing"
    assert len(store.pages) == 4 * (102 // PAGE_SIZE) + 140 // PAGE_SIZE


def test_others_start_while_one_waits() -> None:
    store = filled()
    store.delay = 4
    engine = engine_with(store, FakeRunner())
    engine.add(request("waits", PROMPT))
    engine.add(request("starts", [3, 4, 5]))
    first = engine.step()
    assert [delta.request_id for delta in first] == ["starts"]
    rest = run(engine)
    assert tokens(rest["waits"]) == continuation(PROMPT, 10)


def test_two_requests_with_one_prefix_load_it_once() -> None:
    store = filled()
    store.delay = 2
    engine = engine_with(store, FakeRunner())
    engine.add(request("a", PROMPT))
    engine.add(request("b", [*PROMPT, 7, 7]))
    answers = run(engine)
    assert tokens(answers["a"]) == continuation(PROMPT, 10)
    assert tokens(answers["b"]) == continuation([*PROMPT, 7, 7], 10)
    assert len(store.loads) == 1


@pytest.mark.parametrize("most", [0, 1, 3])
def test_pages_that_are_missing_are_computed(most: int) -> None:
    store = filled()
    store.most_pages = most
    runner = FakeRunner()
    engine = engine_with(store, runner)
    engine.add(request("a", PROMPT))
    assert tokens(run(engine)["a"]) == continuation(PROMPT, 10)
    assert runner.num_computed_tokens >= 100 + 9 - NUM_FULL * PAGE_SIZE


def test_a_store_that_hangs_costs_one_deadline() -> None:
    store, clock = filled(), ManualClock(tick=0.01)
    store.is_hanging = True
    engine = engine_with(store, FakeRunner(), clock)
    engine.add(request("a", PROMPT))
    assert tokens(run(engine)["a"]) == continuation(PROMPT, 10)
    stats = engine.stats().tier
    assert stats is not None and stats.loads["late"] == NUM_FULL
    engine.add(replace(request("b", PROMPT), cache_salt="b"))  # nothing is asked until it answers
    assert tokens(run(engine)["b"]) == continuation(PROMPT, 10)
    assert len(store.loads) == 1


def filled_with(stems: list[list[int]]) -> FakeStore:
    store = FakeStore()
    engine = engine_with(store, FakeRunner())
    for number, stem in enumerate(stems):
        engine.add(request(str(number), stem))
        run(engine)
    return store


def test_a_request_waits_as_long_as_it_would_compute() -> None:
    """A load that takes longer is no reason to switch the store off, as long as it ends."""
    stems = [[number, *PROMPT] for number in (41, 42, 43, 44)]
    store, clock, runner = filled_with(stems), ManualClock(), FakeRunner()
    engine = engine_with(store, runner, clock)
    tier = engine._scheduler.tier
    assert isinstance(tier, PageTiers)
    for stem in stems:
        tier.loads.rule.compute_s, tier.loads.rule.read_rate = 0.1 / 96, 1e6
        store.is_hanging, num_computed = True, runner.num_computed_tokens
        engine.add(request("a", stem))
        for seconds in (0.0, 0.04, 0.04):
            clock.now += seconds
            engine.step()
        assert runner.num_computed_tokens == num_computed, "it waits"
        clock.now += 0.04
        assert tokens(run(engine)["a"]) == continuation(stem, 10)
        assert runner.num_computed_tokens == num_computed + len(stem) + 9
        store.is_hanging = False
        engine.add(request("next", [1]))  # takes the late load
        run(engine)
    assert len(store.loads) == len(stems) and not store.stopped


@pytest.mark.parametrize("load_s", [0.05, 0.7, 1.3, 3.0, 50.0])  # computing takes 1 s
@pytest.mark.parametrize("believed", [0.01, 100.0])  # times the disk's rate
def test_the_first_token_comes_by_the_better_way(load_s: float, believed: float) -> None:
    """A rate that was wrong costs little, also if the disk is too slow, and is known from then
    on."""
    clock, size = SetClock(), 4
    stems = [[number, *PROMPT[1:]] for number in range(41, 45)]
    store, num_pages = TimedStore(clock, 1.0), 99 // size
    cold, warm = (TimedRunner(size, clock, 0.01) for _ in range(2))
    store.page_bytes = size
    engine = engine_with(store, cold, clock)
    for stem in stems:
        engine.add(request("a", stem))
        run(engine)
    engine.close()
    store.page_s = load_s / num_pages
    engine = engine_with(store, warm, clock)
    tier = engine._scheduler.tier
    assert isinstance(tier, PageTiers)
    tier.loads.rule.compute_s = 0.01
    tier.loads.rule.read_rate = believed * size / store.page_s
    ratios = []
    for stem in stems:
        begin = clock.now
        engine.add(request("a", stem))
        first = next(deltas for deltas in iter(engine.step, None) if deltas)
        ratios.append((clock.now - begin) / min(1.0, load_s + 0.04))
        assert tokens(first + run(engine)["a"]) == continuation(stem, 10)
    most = 1.25 if store.page_s > 1.0 else 1.1  # without a page it waits for longer
    assert max(ratios[1:]) <= 1.1 and (believed < 1.0 or ratios[0] <= most), ratios


def test_three_late_loads_in_turn_switch_the_store_off() -> None:
    stems = [[number, *PROMPT] for number in (41, 42, 43, 44)]
    store = filled_with(stems)
    engine = engine_with(store, FakeRunner(), ManualClock(tick=0.01))
    for number, stem in enumerate(stems):
        store.is_hanging = True
        engine.add(request(str(number), stem))
        assert tokens(run(engine)[str(number)]) == continuation(stem, 10)
        store.is_hanging = False
        engine.add(request("next", [number + 1]))  # takes the late load
        run(engine)
    assert len(store.loads) == 3 and "late" in store.stopped


def test_an_abort_while_pages_are_read_leaves_nothing_behind() -> None:
    store = filled()
    store.delay = 3
    engine = engine_with(store, FakeRunner())
    engine.add(request("a", PROMPT))
    engine.step()
    engine.abort("a")
    run(engine)
    engine.add(request("b", PROMPT))
    assert tokens(run(engine)["b"]) == continuation(PROMPT, 10)


def test_salts_do_not_share_stored_pages() -> None:
    store, runner = filled(), FakeRunner()
    engine = engine_with(store, runner)
    engine.add(replace(request("a", PROMPT), cache_salt="other"))
    assert tokens(run(engine)["a"]) == continuation(PROMPT, 10)
    assert store.loads == [] and runner.num_computed_tokens == 109


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@settings(max_examples=60 if EVERY_CASE else 30, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 120)), min_size=1, max_size=8),
    st.integers(0, 4),
    st.integers(10, 24),
    st.integers(0, 5),
)
def test_any_order_of_starts_restarts_and_losses(
    jobs: list[tuple[list[int], int]], delay: int, num_pages: int, most: int
) -> None:
    """Requests share a few beginnings on small caches, with stores that are slow or lose pages."""
    store = FakeStore(delay=delay, room=2)
    for turn in range(2):  # the second engine finds what the first stored
        store.most_pages = None if most > 3 else most
        engine = engine_with(store, FakeRunner(), num_pages=num_pages)
        expected = {}
        for number, (stem, length) in enumerate(jobs):
            prompt = [1 + (stem[i // 20 % len(stem)] * 7 + i) % 40 for i in range(1 + length)]
            expected[f"{turn}-{number}"] = continuation(prompt, 10)
            engine.add(request(f"{turn}-{number}", prompt))
            if number % 2:
                for delta in engine.step():
                    expected[delta.request_id] = expected[delta.request_id][len(delta.token_ids) :]
                engine.check_integrity()
        answers = run(engine)
        for name, rest in expected.items():
            assert tokens(answers.get(name, [])) == rest
        engine.close()
