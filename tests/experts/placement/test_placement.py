"""Placements by hand and drawn: takeovers, alternating replicas, and refusals."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import LostExpert, Placement, RanksOf, contiguous

ROOT = Path(__file__).resolve().parents[3]


def placement(*layers: RanksOf, num_ranks: int = 3) -> Placement:
    return Placement(
        num_ranks=num_ranks, num_experts=len(layers[0]), ranks_of=dict(enumerate(layers))
    )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    ranks = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)
    experts = st.lists(ranks.map(tuple), min_size=num_experts, max_size=num_experts).map(tuple)
    layers = draw(st.dictionaries(st.integers(0, 20), experts, min_size=1, max_size=3))
    return Placement(num_ranks=num_ranks, num_experts=num_experts, ranks_of=layers)


@given(num_experts=st.integers(1, 300), data=st.data())
def test_contiguous_runs_differ_by_one_at_most(num_experts: int, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, num_experts))
    plan = contiguous([1, 2], num_experts, num_ranks)
    held = [plan.held_by(rank)[2] for rank in range(num_ranks)]
    sizes = [len(experts) for experts in held]
    assert sum(held, []) == list(range(num_experts)), "runs in order, each expert once"
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1, f"{num_experts}, {num_ranks}: {sizes}"


@pytest.mark.parametrize("num_ranks", [0, 5])
def test_contiguous_refuses_ranks_without_experts(num_ranks: int) -> None:
    with pytest.raises(PlacementError, match=f"num_ranks must be 1 to 4, .* got {num_ranks} "):
        contiguous([0], 4, num_ranks)


def test_by_hand_a_rank_goes_away() -> None:
    plan = placement(((0,), (0, 1), (1,), (2,)), ((2,), (2, 0), (1,), (2,)))
    left = plan.without({2})
    assert left.ranks_of[0] == ((0,), (0, 1), (1,), ()), "replicas stay"
    assert left.lost == [
        LostExpert(layer=0, expert=3),
        LostExpert(layer=1, expert=0),
        LostExpert(layer=1, expert=3),
    ]
    whole = left.with_lost_given_to([0, 1])
    assert whole.ranks_of[0] == ((0,), (0, 1), (1,), (0,)), "two each: the lower number"
    assert whole.ranks_of[1] == ((1,), (0,), (1,), (0,)), "one each: 0 took one over before"
    assert not whole.lost


def test_by_hand_the_worked_example_of_takeover() -> None:
    whole = placement(((0,), (0,), (1,), (), ())).with_lost_given_to([0, 1])
    assert whole.ranks_of[0][3:] == ((1,), (0,))


@given(plan=placements(), data=st.data())
def test_takeover_keeps_what_is_there_and_balances(plan: Placement, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, plan.num_ranks - 1), max_size=plan.num_ranks - 1))
    survivors = sorted(set(range(plan.num_ranks)) - dead)
    left = plan.without(dead)
    whole = left.with_lost_given_to(survivors)
    assert not whole.lost, f"{whole.lost} are on no rank"
    for layer, experts in whole.ranks_of.items():
        before = Counter(rank for ranks in left.ranks_of[layer] for rank in ranks)
        after = Counter(rank for ranks in experts for rank in ranks)
        assert not dead & after.keys(), f"layer {layer}: dead ranks hold experts"
        gained = [rank for rank in survivors if after[rank] > before[rank]]
        for rank in gained:
            least = min(after[other] for other in survivors)
            assert after[rank] <= least + 1, f"layer {layer}: {after}, {rank} took too many"
        for ranks, kept in zip(experts, left.ranks_of[layer], strict=True):
            assert ranks == kept or not kept, f"layer {layer}: {kept} became {ranks}"


def test_by_hand_copies_take_turns() -> None:
    plan = placement(((0, 1), (2,), (0, 1, 2)))
    ids = np.array([[0, 1], [0, 1], [0, 2], [-1, 2]])
    # Expert 2 starts at copy 2: row 2 takes copy (2 + 2) % 3 = 1, row 3 copy 2.
    assert plan.assign(0, ids).tolist() == [[0, 2], [1, 2], [0, 1], [-1, 2]]


@given(plan=placements(), num_rows=st.integers(0, 40), seed=st.integers(0, 9))
def test_rows_go_to_holders_and_spread(plan: Placement, num_rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ids = generator.integers(-1, plan.num_experts, (num_rows, 2))
    for layer, experts in plan.ranks_of.items():
        ranks = plan.assign(layer, ids)
        for row, pair in enumerate(ids):
            for k, expert in enumerate(pair):
                holders = experts[expert] if expert >= 0 else (-1,)
                assert ranks[row, k] in holders, f"row {row}, expert {expert}: {ranks[row, k]}"
        for expert, holders in enumerate(experts):
            column = np.full((60 * len(holders), 1), expert)
            counts = Counter(plan.assign(layer, column)[:, 0].tolist())
            assert set(counts.values()) == {60}, f"expert {expert} on {holders}: {counts}"
        part = plan.choice(layer).ranks(ids[3:7], np.arange(num_rows)[3:7])
        assert np.array_equal(part, ranks[3:7]), "a row's rank depends on its number alone"


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([((0,), (3,))], "puts expert 1 on rank 3; ranks are 0 to 2"),
        ([((-1,), (2,))], "puts expert 0 on rank -1"),
        ([((0,), (1, 2, 1))], r"expert 1 twice on one rank: \[1, 2, 1\]"),
        ([((0,), (1,)), ((0,),)], "Layer 1 places 1 experts; num_experts is 2"),
    ],
)
def test_refused(layers: list[RanksOf], complaint: str) -> None:
    with pytest.raises(PlacementError, match=complaint):
        placement(*layers)


def test_a_placement_for_another_model_is_refused() -> None:
    plan = contiguous([1, 2, 4], 8, 2)
    plan.check_fits([1, 2, 4], 8, 2)
    with pytest.raises(PlacementError, match="for 8 experts on 2 ranks, but the model has 16 on"):
        plan.check_fits([1, 2, 4], 16, 2)
    with pytest.raises(PlacementError, match=r"missing are \[3\], not in the model are \[4\]"):
        plan.check_fits([1, 2, 3], 8, 2)


def test_no_torch_is_loaded() -> None:
    code = "import sys, experts.placement.plan_file; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False", "experts.placement loads torch"
