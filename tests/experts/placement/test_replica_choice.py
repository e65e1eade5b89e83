"""The choice of copies by policy: by hand, and against properties of every valid choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from experts.placement.replicas.greedy_choices import FewestActivated, LeastTokens, poured
from experts.placement.replicas.replica_choice import LayerChoice, ReplicaPolicy

POLICIES: tuple[ReplicaPolicy, ...] = (
    "round-robin",
    "fewest-activated",
    "least-tokens",
    "lp",
    "auto",
)
Ranks = list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Ranks, NDArray[np.int64]]:
    num_ranks, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    some = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)
    ranks_of = draw(st.lists(some, min_size=num_experts, max_size=num_experts))
    top_k = draw(st.integers(1, min(3, num_experts)))
    row = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    rows = draw(st.lists(row, min_size=1, max_size=24))
    return ranks_of, np.array(rows, dtype=np.int64)


def activated(ids_TK: NDArray[np.int64], ranks_TK: NDArray[np.int64], num_ranks: int) -> list[int]:
    """Returns the activated experts of each rank."""
    pairs = {(int(e), int(r)) for e, r in zip(ids_TK.flat, ranks_TK.flat, strict=True) if e >= 0}
    return [sum(rank == r for _, r in pairs) for rank in range(num_ranks)]


@pytest.mark.parametrize("policy", POLICIES)
@given(case=cases())
def test_a_choice_goes_to_a_holder(
    policy: ReplicaPolicy, case: tuple[Ranks, NDArray[np.int64]]
) -> None:
    ranks_of, ids_TK = case
    ranks_TK = LayerChoice(policy, 3, ranks_of).ranks(ids_TK)
    for expert, rank in zip(ids_TK.flat, ranks_TK.flat, strict=True):
        assert rank == -1 if expert < 0 else rank in ranks_of[expert], f"{expert} on {rank}"
    again_TK = LayerChoice(policy, 3, ranks_of).ranks(ids_TK)
    assert np.array_equal(again_TK, ranks_TK), "others with the same rows choose the same"


@settings(max_examples=60, derandomize=True)
@given(case=cases())
def test_fewest_activated_is_near_the_least(case: tuple[Ranks, NDArray[np.int64]]) -> None:
    """The greedy choice is at most one above the least of all choices."""
    ranks_of, ids_TK = case
    num_ranks = 1 + max(rank for ranks in ranks_of for rank in ranks)
    ranks_TK = FewestActivated(ranks_of).ranks(ids_TK)
    most = max(activated(ids_TK, ranks_TK, num_ranks))
    used = sorted({int(e) for e in ids_TK.flat if e >= 0})
    least = min(
        max(np.bincount(chosen, minlength=num_ranks)) if chosen else 0
        for chosen in itertools.islice(itertools.product(*(ranks_of[e] for e in used)), 5000)
    )
    assert most <= least + 1, f"{most} activated on the busiest rank, {least} can be had"
    assert sum(activated(ids_TK, ranks_TK, num_ranks)) == len(used), "each expert on one rank"


def test_fewest_activated_by_hand() -> None:
    ids_TK = np.array([[0, 2], [1, 3], [-1, 2]])
    ranks_TK = FewestActivated([[0], [0], [0, 1], [0, 1]]).ranks(ids_TK)
    assert ranks_TK.tolist() == [[0, 1], [0, 1], [-1, 1]]


def test_least_tokens_by_hand() -> None:
    ids_TK = np.array([[0]] * 4 + [[1]] * 6)
    ranks_TK = LeastTokens([[0], [0, 1]]).ranks(ids_TK)
    assert ranks_TK[:, 0].tolist() == [0] * 4 + [0] + [1] * 5


@given(levels=st.lists(st.integers(0, 30), min_size=1, max_size=5), amount=st.integers(1, 60))
def test_pouring_levels(levels: list[int], amount: int) -> None:
    quotas = np.array(poured(levels, amount))
    assert quotas.sum() == amount and (quotas >= 0).all(), f"{quotas}"
    after = np.array(levels) + quotas
    if (quotas > 0).any():
        assert after[quotas > 0].max() <= after.min() + 1, f"{levels} + {quotas} is not level"


def test_auto_goes_by_rows_of_an_expert() -> None:
    ranks_of = [[0, 1], [0, 1]]
    few, many = np.array([[0, 1]] * 4), np.array([[0, 1]] * 16)
    for ids_TK, policy in ((few, "fewest-activated"), (many, "lp")):
        want = LayerChoice(policy, 0, ranks_of).ranks(ids_TK)  # type: ignore[arg-type]
        assert np.array_equal(LayerChoice("auto", 0, ranks_of).ranks(ids_TK), want), policy
    assert not np.array_equal(
        LayerChoice("fewest-activated", 0, ranks_of).ranks(many),
        LayerChoice("least-tokens", 0, ranks_of).ranks(many),
    ), "the two differ where it matters"
