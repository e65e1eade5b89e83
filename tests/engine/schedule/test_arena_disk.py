"""A disk behind the arena, on fake ranks: every answer checks the pages it was made from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.arena import ArenaIndex
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule import arena_disk, arena_tier
from moe_serve.engine.schedule.arena_disk import ArenaDisk
from moe_serve.engine.schedule.arena_tier import ArenaTier, RankCopies
from moe_serve.model.step_plan import StepPlan
from tests.support.engine.fake_engine import request, run, tokens
from tests.support.engine.fake_runner import PAGE_SIZE, FakeRunner, continuation
from tests.support.engine.fake_store import FakeStore
from tests.support.sampled_cases import EVERY_CASE

PROMPT = [1 + index % 40 for index in range(100)]
NUM_FULL = 99 // PAGE_SIZE
TORN = 77  # in slots and pages that nothing was copied to


class FakeRank(LocalExecutor):
    """Works on pages only before its next step or when it is asked, as a rank does."""

    def __init__(self, runner: FakeRunner, slots: NDArray[np.uint8]) -> None:
        super().__init__(runner, Sampler(frozenset()))
        self._fake, self._slots = runner, slots
        self._work: list[Callable[[], None]] = []
        self.copies = RankCopies(self._save, self._load, self._finish)

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        self._do_work()
        return super().run(plan, sequences)

    def clear_pages(self, pages: list[int]) -> None:
        self._work.append(lambda: self._fake.clear_pages(pages))

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        pairs = list(pairs)
        self._work.append(lambda: self._fake.copy_pages(pairs))

    def finite_pages(self, pages: list[int]) -> list[bool]:
        self._do_work()
        return self._fake.finite_pages(pages)

    def _save(self, page: int, slot: int) -> None:
        def save() -> None:
            self._slots[slot] = self._fake.slots[page]

        self._work.append(save)

    def _load(self, slot: int, page: int) -> None:
        def load() -> None:
            self._fake.slots[page] = self._slots[slot].tolist()

        self._work.append(load)

    def _finish(self, page: int) -> None:
        self.finite_pages([page])

    def _do_work(self) -> None:
        work, self._work = self._work, []
        for each in work:
            each()


class World:
    """Ranks that share an arena with a store behind it."""

    def __init__(
        self,
        store: FakeStore,
        num_slots: int = 64,
        clock: Clock | None = None,
        ranks: int = 1,
        give_after_s: float = 0.0,
    ) -> None:
        self._give_after_s = give_after_s
        self.now, self._ids = 1000.0, itertools.count()
        clock = (lambda: self.now) if clock is None else clock
        self.arena = ArenaIndex(num_slots * PAGE_SIZE, PAGE_SIZE)
        self._slots, self._clock = np.full((num_slots, PAGE_SIZE), TORN, dtype=np.uint8), clock
        self.disk = ArenaDisk(self.arena, self._slots, store, PAGE_SIZE, clock)
        self.runners = [FakeRunner() for _ in range(ranks)]
        self.engines = [self._engine(runner) for runner in self.runners]

    def replace(self, lost: Engine) -> None:
        """Puts a new rank in the place of a lost one."""
        self.engines[self.engines.index(lost)] = self._engine(FakeRunner())

    def _engine(self, runner: FakeRunner) -> Engine:
        rank, clock = FakeRank(runner, self._slots), self._clock

        def make(cache: PrefixCache) -> ArenaTier:
            give_after_s = self._give_after_s
            return ArenaTier(cache, self.arena, rank.copies, clock, give_after_s, self.disk)

        return Engine(
            rank,
            scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
            num_pages=20,
            page_size=PAGE_SIZE,
            micro_batches=1,
            max_model_len=160,
            eos_token_ids=frozenset(),
            make_tier=make,
            clock=clock,
            ids=self._ids,
        )

    def answer(self, prompt: list[int], rank: int = 0, name: str = "a") -> list[int]:
        self.engines[rank].add(request(name, prompt))
        found = tokens(run(self.engines[rank]).get(name, []))
        self.arena.check_integrity()
        return found

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.disk.close()


def filled() -> FakeStore:
    """Returns a store with the pages of PROMPT and its answer."""
    store = FakeStore()
    world = World(store)
    assert world.answer(PROMPT) == continuation(PROMPT, 10)
    return store


def test_pages_are_stored_while_a_rank_is_idle() -> None:
    store = filled()
    assert len(store.pages) == (100 + 10 - 1) // PAGE_SIZE, "without a later step, and no close"
    for page in store.pages.values():
        assert TORN not in page, "a slot was stored before it was filled"
    children = {parent: key for key, parent in store.parents.items()}
    roots = store.parents.values() - store.pages.keys()
    assert len(roots) == 1 and len(children) == len(store.pages), "the pages form one chain"


def test_a_step_is_not_sent_ahead_while_copies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are sent ahead have no copies, and a long answer may have no other steps."""
    monkeypatch.setattr(arena_tier, "_PAGES_PER_STEP", 1)
    world = World(store := FakeStore(), give_after_s=2.0)
    (engine,) = world.engines
    engine.add(request("a", PROMPT, max_tokens=50))
    engine.step()
    engine.step()
    engine.begin_step()
    assert engine.begin_ahead() and not store.pages, "no page is due"
    engine.drop_ahead()
    world.now += 3
    num_scheduled = 0
    while len(store.pages) < NUM_FULL:
        engine.end_step(engine._try(engine.make_plan(), engine._schedule))
        engine.begin_step()
        num_scheduled += not engine.begin_ahead()
        engine.drop_ahead()
    assert num_scheduled >= NUM_FULL - 1, "the last copy is under way when nothing else waits"


def test_steps_are_sent_ahead_while_pages_wait_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_disk, "_PAGES_PER_TURN", 1)
    world = World(store := FakeStore(), give_after_s=2.0)
    (engine,) = world.engines
    engine.add(request("a", PROMPT, max_tokens=50))
    engine.step()
    engine.step()
    world.now += 3
    engine.begin_step()
    is_ahead = list[bool]()
    while len(store.pages) < NUM_FULL and len(is_ahead) < 20:
        engine.end_step(engine._try(engine.make_plan(), engine._schedule))
        engine.begin_step()
        is_ahead.append(engine.begin_ahead())
        engine.drop_ahead()
    assert len(store.pages) == NUM_FULL and all(is_ahead)


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_new_ranks_start_with_the_stored_pages(delay: int) -> None:
    store = filled()
    store.delay = delay
    world = World(store, ranks=2)
    assert world.answer(PROMPT) == continuation(PROMPT, 10)
    assert world.runners[0].num_computed_tokens == 100 + 9 - NUM_FULL * PAGE_SIZE
    assert world.answer(PROMPT, rank=1) == continuation(PROMPT, 10)
    assert world.runners[1].num_computed_tokens == 100 + 9 - NUM_FULL * PAGE_SIZE
    assert len(store.loads) == 1, "the other rank finds the copies"
    tier = world.disk.stats()
    assert tier.hit_tokens == 2 * NUM_FULL * PAGE_SIZE
    assert tier.memory is not None and tier.memory.num_pages >= NUM_FULL


@pytest.mark.parametrize("num_aborted", [1, 2, 3])
def test_pages_of_an_aborted_prompt_are_not_cleared_after_a_load(num_aborted: int) -> None:
    """The rank does its work in order: a page that is cleared after its load has no values."""
    world = World(FakeStore(), ranks=2)
    assert world.answer(PROMPT) == continuation(PROMPT, 10)
    engine = world.engines[1]
    for index in range(num_aborted):
        engine.add(request(f"b{index}", [50 + index] * 100))
        engine.step()
        engine.abort(f"b{index}")
    assert world.answer(PROMPT, rank=1) == continuation(PROMPT, 10)
    world.arena.check_integrity()


def test_a_load_outlives_the_rank_that_wanted_it() -> None:
    store = filled()
    store.delay = 3
    world = World(store, ranks=2)
    lost, other = world.engines
    lost.add(request("a", PROMPT))
    lost.step()
    (sequence,) = lost.surrender()
    other.adopt(sequence)
    assert tokens(run(other)["a"]) == continuation(PROMPT, 10)
    assert len(store.loads) == 1
    assert world.runners[1].num_computed_tokens == 100 + 9 - NUM_FULL * PAGE_SIZE
    world.arena.check_integrity()


def test_copies_of_a_lost_rank_are_not_stored() -> None:
    store = FakeStore()
    world = World(store, ranks=2)
    world.engines[0].add(request("a", PROMPT))
    world.engines[0].step()
    world.engines[0].step()
    world.engines[0].surrender()
    num_known = len(world.arena)
    assert world.answer([9, 9, 9], rank=1, name="b") == continuation([9, 9, 9], 10)
    assert len(store.pages) == num_known
    for page in store.pages.values():
        assert TORN not in page
    world.arena.check_integrity()


@pytest.mark.faults
def test_a_failed_step_proves_no_copy() -> None:
    """A shard of the rank may lag behind when the rank reports a failure."""
    store = FakeStore()
    world = World(store)
    (engine,), (runner,) = world.engines, world.runners
    engine.add(request("a", PROMPT))
    engine.step()
    engine.step()  # has the first step's pages copied
    num_known, runner.fails_next = len(world.arena), True
    engine.step()
    assert len(world.arena) == num_known < len(PROMPT) // PAGE_SIZE
    run(engine)  # the only sequence of a failed step has ended
    assert world.answer(PROMPT, name="b") == continuation(PROMPT, 10)
    assert len(store.pages) == (100 + 10 - 1) // PAGE_SIZE


def test_a_store_that_hangs_costs_one_deadline() -> None:
    store, time = filled(), [1000.0]
    store.is_hanging = True

    def clock() -> float:
        time[0] += 0.01
        return time[0]

    world = World(store, clock=clock, ranks=2)
    assert world.answer(PROMPT) == continuation(PROMPT, 10)
    assert world.disk.stats().loads["late"] == NUM_FULL
    other = [41, *PROMPT]  # nothing is asked until the store answers
    assert world.answer(other, rank=1) == continuation(other, 10)
    assert len(store.loads) == 1


@pytest.mark.parametrize("num_slots", [4, 5, 6, 7])
def test_few_slots_take_a_part_of_a_run(num_slots: int) -> None:
    world = World(filled(), num_slots)
    assert world.answer(PROMPT) == continuation(PROMPT, 10)
    assert 0 < world.disk.stats().hit_tokens <= num_slots * PAGE_SIZE


def test_closing_stores_what_is_only_in_pages() -> None:
    store = FakeStore(room=3)
    world = World(store)
    world.engines[0].add(request("a", PROMPT))
    while not any(delta.finish_reason for delta in world.engines[0].step()):
        continue
    world.close()
    assert len(store.pages) == (100 + 10 - 1) // PAGE_SIZE


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@settings(max_examples=40 if EVERY_CASE else 20, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(0, 120), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 4),
    st.integers(4, 16),
    st.integers(0, 5),
)
def test_any_order_of_starts_losses_and_restarts(
    jobs: list[tuple[list[int], int, int]], delay: int, num_slots: int, most: int
) -> None:
    """Requests run on two ranks with a small arena; stores are slow or lose pages, and a rank is
    lost now and then."""
    store = FakeStore(delay=delay, room=2)
    for _ in range(2):  # the second world finds what the first stored
        store.most_pages = None if most > 3 else most
        world = World(store, num_slots, ranks=2)
        expected, got = {}, dict[str, list[int]]()
        for number, (stem, length, event) in enumerate(jobs):
            prompt = [1 + (stem[i // 20 % len(stem)] * 7 + i) % 40 for i in range(1 + length)]
            expected[str(number)] = continuation(prompt, 10)
            engine, other = world.engines[number % 2], world.engines[1 - number % 2]
            engine.add(request(str(number), prompt))
            for delta in [*engine.step(), *other.step()]:
                got.setdefault(delta.request_id, []).extend(delta.token_ids)
            if event == 1:
                for sequence in engine.surrender():
                    other.adopt(sequence)
                world.replace(engine)
            world.arena.check_integrity()
        while any(engine.has_work for engine in world.engines):
            for engine in world.engines:
                for delta in engine.step():
                    got.setdefault(delta.request_id, []).extend(delta.token_ids)
            world.arena.check_integrity()
        assert got == expected
        for page in store.pages.values():
            assert TORN not in page
        world.close()
