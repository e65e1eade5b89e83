"""Moves and steps by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experts.placement.judge.copies import copies_of
from experts.placement.judge.steps import draw_steps, step_balance
from experts.placement.plan_report import count_moves
from experts.placement.problem.devices import Device, Devices
from experts.placement.problem.loads import ExpertLoads, TokenChoices
from experts.placement.problem.placement import Placement, RanksOf, contiguous
from experts.placement.problem.plan_limits import Move
from experts.placement.problem.problem import PlacementProblem

FOUR = Devices(
    devices=tuple(Device(node=node, num_slots=3) for node in (0, 0, 1, 1)),
    bytes_per_s_in_node=10.0,
    bytes_per_s_between_nodes=5.0,
)


def problem(
    current: RanksOf | None = None, top_k: int | None = None, batch_size: int = 64
) -> PlacementProblem:
    """Returns a problem of four identical experts in one layer."""
    move = None
    if current is not None:
        move = Move(current=Placement(num_ranks=4, num_experts=4, ranks_of={7: current}))
    loads = ExpertLoads(counts_SLE=np.ones((1, 1, 4)), layers=(7,), scenarios=("all",))
    return PlacementProblem(
        loads=loads,
        devices=FOUR,
        bytes_per_expert=20,
        move=move,
        fill=False,
        top_k=top_k,
        batch_size=batch_size,
    )


def test_by_hand_copies_come_from_the_nearest_holder() -> None:
    """Expert 0 goes to device 1 (from 0, beside it) and 3 (from 0, on the other node). Expert 1
    leaves device 1. Of the two holders of expert 2, the one beside device 3 sends."""
    now = ((0,), (0, 1), (0, 2), (3,))
    after = Placement(num_ranks=4, num_experts=4, ranks_of={7: ((0, 1, 3), (0,), (0, 2, 3), (3,))})
    moves = count_moves(problem(now), after)
    assert moves is not None
    assert (moves.copies, moves.most_of_layer, moves.between_nodes) == (3, 3, 1)
    assert moves.num_bytes == 60
    # Device 0 sends 20 bytes at 10 and 20 at 5: 6 s; device 3 gets 20 at 5 and 20 at 10: 6 s.
    assert moves.seconds == pytest.approx(6.0)
    assert moves.sentence.startswith("3 copies, at most 3 in a layer, 1 of them between nodes: ")
    assert count_moves(problem(), after) is None


def test_by_hand_a_plan_that_stays_costs_nothing() -> None:
    now = ((0,), (1,), (2,), (3,))
    moves = count_moves(problem(now), Placement(num_ranks=4, num_experts=4, ranks_of={7: now}))
    assert moves is not None and (moves.copies, moves.num_bytes, moves.seconds) == (0, 0, 0.0)


def test_by_hand_the_balance_of_steps() -> None:
    """Four experts have the rows 4, 2, 1, 1. With one per device the mean is 2 and the largest 4.
    With expert 0 in equal parts on devices 0 and 1: 2, 4, 1, 1; split at dispatch: 3, 3, 1, 1."""
    rows_WLE = np.array([[[4, 2, 1, 1]]])
    asked = problem(top_k=2)
    single = contiguous((7,), 4, 4)
    found = step_balance(asked, copies_of(single, (7,)), rows_WLE, has_tokens=False)
    assert (found.even, found.split) == (0.5, None)
    twice = Placement(num_ranks=4, num_experts=4, ranks_of={7: ((0, 1), (1,), (2,), (3,))})
    found = step_balance(asked, copies_of(twice, (7,)), rows_WLE, has_tokens=False)
    assert found.even == pytest.approx(2 / 4) and found.split == pytest.approx(2 / 3)


def test_steps_are_drawn_from_tokens_or_loads() -> None:
    ids_NLK = np.array([[[0, 1]], [[2, 3]]])
    choices = TokenChoices(expert_ids_NLK=ids_NLK, num_experts=4, layers=(7,))
    rows_WLE = draw_steps(problem(batch_size=8), choices)
    assert rows_WLE is not None and rows_WLE.shape[1:] == (1, 4)
    assert (rows_WLE.sum(axis=2) == 16).all() and (rows_WLE[..., 0] == rows_WLE[..., 1]).all()
    drawn = draw_steps(problem(top_k=2, batch_size=8), None)
    assert drawn is not None and (drawn.sum(axis=2) == 16).all()
    assert draw_steps(problem(), None) is None, "nobody knows how many experts a token chooses"
