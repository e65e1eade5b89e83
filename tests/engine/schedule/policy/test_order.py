"""The order of starts: sequences that fit the batch go first, and no wait exceeds the bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence
from tests.support.engine.batch_world import NUM_EXPERTS, NUM_LAYERS, World, decode, of_domain
from tests.support.sampled_cases import EVERY_CASE


def admit(
    world: World,
    waiting: deque[Sequence],
    running: list[Sequence],
    count: int,
    lacking: Callable[[int], bool] = lambda key: False,
) -> list[int]:
    """Offers `count` free seats as the scheduler does and returns the ids that started. `lacking`
    returns True if there are no pages for a sequence."""
    world.policy.prepare(waiting, running)
    started: list[Sequence] = []
    for sequence in world.policy.candidates(waiting, running) if count else ():
        if lacking(sequence.id):
            if world.policy.is_next(sequence):
                break
            continue
        sequence.is_running = True
        world.policy.started(sequence)
        running.append(sequence)
        started.append(sequence)
        if len(started) == count:
            break
    for sequence in started:
        waiting.remove(sequence)
    return [sequence.id for sequence in started]


def test_those_who_share_experts_join() -> None:
    world = World()
    running = [world.sequence(of_domain(1))]
    waiting = deque(world.sequence(of_domain(n % 2)) for n in range(8))
    assert admit(world, waiting, running, 4) == [2, 4, 6, 8]
    assert world.policy.stats().num_passed_over == 1 + 2 + 3 + 4


def test_whoever_is_passed_over_often_enough_is_next() -> None:
    world = World(max_passed_over=2)
    running = [world.sequence(of_domain(1))]
    waiting = deque(world.sequence(of_domain(n)) for n in (0, 1, 1, 1, 0))
    assert admit(world, waiting, running, 5) == [2, 3, 1, 4, 5]


def test_without_signatures_in_order_of_arrival() -> None:
    world = World()
    waiting = deque(world.sequence() for _ in range(4))
    assert admit(world, waiting, [], 3) == [0, 1, 2]


def test_whoever_waited_long_is_next() -> None:
    world = World(max_age_s=5.0)
    running = [world.sequence(of_domain(1))]
    waiting = deque([world.sequence(of_domain(0)), world.sequence(of_domain(1))])
    world.policy.prepare(waiting, running)
    world.now = 5.0
    waiting.append(world.sequence(of_domain(1)))
    assert admit(world, waiting, running, 1) == [1]


def test_whoever_was_preempted_goes_first() -> None:
    world = World()
    running = [world.sequence(of_domain(1))]
    back = world.sequence(of_domain(0))
    back.restart()
    waiting = deque([back, world.sequence(of_domain(1))])
    assert admit(world, waiting, running, 2) == [1, 2]


def test_whoever_moved_here_from_a_lost_rank_jumps_no_queue() -> None:
    world = World()
    running = [world.sequence(of_domain(1))]
    first, moved = world.sequence(of_domain(1)), world.sequence(of_domain(0))
    moved.restart()
    assert admit(world, deque([first, moved]), running, 2) == [1, 2]


def test_who_lacks_pages_keeps_back_others_only_when_it_is_its_turn() -> None:
    """Sequence 3 fits best and is offered first each time, but arrived late."""
    world = World()
    running = [world.sequence(of_domain(1))]
    waiting = deque(world.sequence(of_domain(n)) for n in (0, 0, 1))
    assert admit(world, waiting, running, 1, lambda key: key == 3) == [1]
    assert admit(world, waiting, running, 1, lambda key: key == 3) == [2]
    waiting.append(world.sequence(of_domain(0)))
    assert admit(world, waiting, running[:1], 1, lambda key: key == 3) == [], "it is the first now"
    assert admit(world, waiting, running[:1], 2) == [3, 4]


def test_who_lacks_pages_is_passed_over_within_the_bound() -> None:
    world = World(max_passed_over=2)
    running = [world.sequence(of_domain(1))]
    waiting = deque(world.sequence(of_domain(n)) for n in (0, 1, 1, 1, 1, 1))
    assert admit(world, waiting, running, 9, lambda key: key == 2) == [3, 4]
    assert world.policy.stats().num_passed_over == 2 + 2, "by each of the two: 1 and 2"
    assert admit(world, waiting, running, 9, lambda key: key == 2) == [1]
    assert admit(world, waiting, running, 9, lambda key: key == 2) == []
    assert admit(world, waiting, running, 9) == [2, 5, 6]


def test_an_age_counts_from_the_arrival() -> None:
    """This includes sequences behind the window of those that are compared."""
    world = World(max_age_s=5.0, window=2)
    running = [world.sequence(of_domain(1))]
    waiting = deque(world.sequence(of_domain(n)) for n in (0, 0, 0, 1))
    world.policy.prepare(waiting, running)
    world.now = 5.0
    for key in (1, 2, 3):  # though 4 suits better than 3
        assert admit(world, waiting, running, 1) == [key]


def test_many_who_cannot_start_are_not_compared_again_and_again() -> None:
    """All 256 wait for pages that another sequence computes, and each is looked at once."""
    world = World()
    running = [world.sequence(of_domain(1))]
    waiting = deque(world.sequence(of_domain(n % 2)) for n in range(256))
    with_each, calls = world.cost.with_each, []

    def counted(rows: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
        def cost(sums: NDArray[np.float32]) -> NDArray[np.float32]:
            calls.append(len(rows))
            return with_each(rows)(sums)

        return cost

    world.policy._cost = SimpleNamespace(with_each=counted)  # type: ignore[assignment]
    world.policy.prepare(waiting, running)
    order = [sequence.id for sequence in world.policy.candidates(waiting, running)]
    assert order == [*range(2, 257, 2), *range(1, 257, 2)], "who suits first, by arrival"
    assert calls == [256]


def test_what_is_not_split_is_expected_too() -> None:
    """The gauge follows the step: one group has at most the sum of two."""
    world = World()
    keys = [world.sequence(of_domain(n % 2)).id for n in range(4)]
    assert world.policy.stats().activated_experts is None
    world.policy.split(decode(keys), 2)
    split = world.policy.stats().activated_experts
    world.policy.split(decode(keys), 1)
    whole = world.policy.stats().activated_experts
    world.policy.split(decode(keys[:1]), 1)
    single = world.policy.stats().activated_experts
    assert split is not None and whole is not None and single is not None
    assert single == pytest.approx(NUM_LAYERS * NUM_EXPERTS / 2 * 0.52, rel=1e-3)
    assert single < whole < split


def test_an_offer_that_came_to_nothing_is_forgotten() -> None:
    world = World()
    running = [world.sequence(of_domain(1))]
    waiting = deque([world.sequence(of_domain(0)), world.sequence(of_domain(1))])
    world.policy.prepare(waiting, running)
    assert next(iter(world.policy.candidates(waiting, running))) is waiting[1]  # it lacks pages
    world.source.is_on = False
    assert admit(world, waiting, running, 2) == [1, 2]
    assert world.policy.stats().num_passed_over == 0


arrivals = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=5, max_size=40)


@settings(max_examples=60 if EVERY_CASE else 30, deadline=None)
@given(arrivals, st.integers(0, 5), st.integers(0, 9))
def test_nobody_is_passed_over_more_often_than_allowed(
    steps: list[tuple[int, int]], bound: int, seed: int
) -> None:
    """Arrivals, seats and signatures are drawn (a few are missing); every request starts in the
    end."""
    world, rng = World(max_passed_over=bound), np.random.default_rng(seed)
    waiting: deque[Sequence] = deque()
    running: list[Sequence] = []
    started: list[int] = []
    for num_new, num_seats in [*steps, *[(0, 3)] * 100]:
        for _ in range(num_new):
            known = of_domain(int(rng.integers(2)), rng) if rng.random() < 0.9 else None
            waiting.append(world.sequence(known))
        lacks = set(rng.integers(0, 40, 6).tolist()) if num_new else set()  # pages, by then
        seats = min(num_seats, len(waiting))
        started += admit(world, waiting, running, seats, lacks.__contains__)
        while len(running) > 6:
            gone = running.pop(int(rng.integers(len(running))))
            world.policy.forget([gone.id])
    assert not waiting
    for place, key in enumerate(started):
        passed_by = sum(later > key for later in started[:place])
        assert passed_by <= bound, f"{key} let {passed_by} later ones go first; {bound} may"
