"""Sequences with costly masks skip some steps, so that others go on; their tokens stay the same."""

from __future__ import annotations

import pytest

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.answer_masks import MaskCost
from moe_serve.engine.sampling.mask_share import MaskShare

STEP_S, DEAR_S, CHEAP_S = 0.01, 0.05, 0.0001


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sequence(number: int, pattern: str | None) -> Sequence:
    constraint = None if pattern is None else Constraint("regex", pattern)
    request = GenerationRequest(
        request_id=f"r{number}", prompt_token_ids=(1,), params=SamplingParams(constraint=constraint)
    )
    made = Sequence(number, request)
    for token in range(3):
        made.append(token)
    return made


def steps(
    share: MaskShare, clock: Clock, running: list[Sequence], costs: dict[int, float], count: int
) -> tuple[dict[int, int], float]:
    """Returns how often each sequence ran, and the seconds of the longest step."""
    ran, longest = dict.fromkeys((s.id for s in running), 0), 0.0
    for _ in range(count):
        chosen = share.affordable(running, is_alone=True)
        masks = {s.id: costs[s.id] for s in chosen if s.id in costs}
        longest = max(longest, STEP_S + sum(masks.values()))
        clock.now += STEP_S + sum(masks.values())
        share.charge({key: MaskCost(cost, cost) for key, cost in masks.items()}, chosen)
        for s in chosen:
            ran[s.id] += 1
    return ran, longest


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_dear_masks_take_as_long_as_the_rest_and_no_longer(clock: Clock) -> None:
    share = MaskShare(1.0, clock)
    running = [sequence(0, None), *(sequence(i, f"x{i}") for i in range(1, 65))]
    costs = dict.fromkeys(range(1, 65), DEAR_S)
    steps(share, clock, running, costs, 1)  # nothing is known of them yet
    debt_s = clock.now
    ran, longest = steps(share, clock, running, costs, 1000)
    assert ran[0] == 1000, "a free row is in every step"
    masks_s = clock.now - debt_s - 1000 * STEP_S
    assert masks_s <= 1.1 * 1000 * STEP_S + 0.1
    assert longest <= STEP_S + 0.1 + DEAR_S, "what was saved up, and one more"


def test_cheap_masks_are_never_left_out(clock: Clock) -> None:
    share = MaskShare(1.0, clock)
    running = [sequence(0, "cheap"), *(sequence(i, "dear") for i in range(1, 9))]
    costs = {0: CHEAP_S, **dict.fromkeys(range(1, 9), DEAR_S)}
    steps(share, clock, running, costs, 3)
    ran, _ = steps(share, clock, running, costs, 200)
    assert ran[0] == 200
    dear = [ran[i] for i in range(1, 9)]
    assert max(dear) - min(dear) <= 1, "they take turns"


def test_where_all_are_dear_one_runs(clock: Clock) -> None:
    share = MaskShare(1.0, clock)
    running = [sequence(i, "dear") for i in range(4)]
    costs = dict.fromkeys(range(4), DEAR_S)
    ran, _ = steps(share, clock, running, costs, 100)
    assert sum(ran.values()) >= 100 and min(ran.values()) >= 20


def test_a_new_sequence_of_a_known_grammar_is_expected_to_cost_the_same(clock: Clock) -> None:
    share = MaskShare(1.0, clock)
    old = [sequence(0, None), sequence(1, "dear")]
    steps(share, clock, old, {1: 1.0}, 1)
    fresh = [sequence(0, None), sequence(2, "dear"), sequence(3, None)]
    assert [s.id for s in share.affordable(fresh, is_alone=True)] == [0, 3]
    assert not share.can_afford(fresh) and share.can_afford([fresh[0]])


def test_who_hardly_runs_gives_up_the_seat_only_if_others_wait(clock: Clock) -> None:
    share = MaskShare(1.0, clock)
    running = [sequence(0, None), *(sequence(i, "dear") for i in range(1, 65))]
    steps(share, clock, running, dict.fromkeys(range(1, 65), DEAR_S), 300)
    assert share.overdue(running, 0) == []
    late = share.overdue(running, 2)
    assert len(late) == 2 and 0 not in {s.id for s in late}
    share.forget(running)
    assert share.overdue(running, 2) == []


def test_ended_sequences_are_forgotten(clock: Clock) -> None:
    share = MaskShare(1.0, clock)
    for i in range(1000):
        made = [sequence(i, f"p{i}")]
        steps(share, clock, made, {i: DEAR_S}, 2)
        share.forget(made)
    assert not share._expected and not share._held and len(share._by_grammar) <= 256


def test_a_busy_machine_makes_no_grammar_dear(clock: Clock) -> None:
    """A mask that waited for the processor took long but cost little CPU time."""
    share = MaskShare(1.0, clock)
    running = [sequence(i, f"cheap{i}") for i in range(64)]
    for _ in range(100):
        chosen = share.affordable(running, is_alone=True)
        clock.now += 1.0
        share.charge({s.id: MaskCost(CHEAP_S, 0.1) for s in chosen}, chosen)
    assert len(share.affordable(running, is_alone=True)) == 64
    assert share.overdue(running, 64) == []


def test_masks_within_their_share_of_long_steps_are_paid_from_these_steps(clock: Clock) -> None:
    """A step of 1.2 s earns more than the burst before its masks of 0.2 s are paid."""
    share = MaskShare(1.0, clock)
    running = [sequence(0, None), *(sequence(i, f"x{i}") for i in range(1, 5))]
    for step in range(20):
        chosen = share.affordable(running, is_alone=True)
        assert len(chosen) == 5 or step < 3
        clock.now += 1.2
        share.charge({s.id: MaskCost(DEAR_S, DEAR_S) for s in chosen if s.id}, chosen)
    assert share.overdue(running, 5) == []


def test_few_long_steps_without_a_sequence_do_not_end_it(clock: Clock) -> None:
    """Masks that waited for the processor put the balance into debt; steps of 2 s repay it."""
    share = MaskShare(1.0, clock)
    running = [sequence(0, None), sequence(1, "dear")]
    num_left_out = 0
    for _ in range(20):
        chosen = share.affordable(running, is_alone=True)
        num_left_out += len(chosen) == 1
        clock.now += 2.0
        share.charge({s.id: MaskCost(DEAR_S, 1.5) for s in chosen if s.id}, chosen)
        assert share.overdue(running, 1) == []
    assert num_left_out >= 5
