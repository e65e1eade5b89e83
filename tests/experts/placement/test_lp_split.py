"""The split of rows over copies: by hand, against all sets of ranks, and against HiGHS."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from experts.placement.replicas.lp_split import LpSplit

Ranks = list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Ranks, list[int]]:
    num_ranks, num_experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    some = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks, unique=True)
    ranks_of = draw(st.lists(some, min_size=num_experts, max_size=num_experts))
    counts = draw(st.lists(st.integers(0, 40), min_size=num_experts, max_size=num_experts))
    return ranks_of, counts


def loads_of(ranks_of: Ranks, counts: list[int]) -> list[int]:
    """Returns the load of each rank under the split."""
    quotas = LpSplit(ranks_of).quotas(np.array(counts))
    loads = [0] * (1 + max(rank for ranks in ranks_of for rank in ranks))
    for expert, ranks in enumerate(ranks_of):
        quota = quotas.get(expert, [counts[expert]] if len(ranks) == 1 else [0] * len(ranks))
        assert sum(quota) == counts[expert] and min(quota) >= 0, f"expert {expert}: {quota}"
        for rank, rows in zip(ranks, quota, strict=True):
            loads[rank] += rows
    return loads


def least_by_sets(ranks_of: Ranks, counts: list[int]) -> int:
    """For each set of ranks, divides the rows that must be on it by its size, rounded up; returns
    the largest quotient."""
    num_ranks = 1 + max(rank for ranks in ranks_of for rank in ranks)
    sets = (
        set(chosen)
        for size in range(1, num_ranks + 1)
        for chosen in itertools.combinations(range(num_ranks), size)
    )
    return max(
        -(-sum(c for c, ranks in zip(counts, ranks_of, strict=True) if chosen >= {*ranks}) // n)
        for chosen in sets
        for n in [len(chosen)]
    )


@settings(max_examples=80, derandomize=True, deadline=None)
@given(case=cases())
def test_the_busiest_rank_has_the_least_that_can_be(case: tuple[Ranks, list[int]]) -> None:
    ranks_of, counts = case
    loads = loads_of(ranks_of, counts)
    assert max(loads) == least_by_sets(ranks_of, counts), f"{loads}"


def test_by_hand() -> None:
    quotas = LpSplit([[0], [0, 1], [1, 2]]).quotas(np.array([6, 3, 9]))
    assert quotas == {1: [0, 3], 2: [3, 6]}
    ids_TK = np.array([[0, 1]] * 3 + [[2, 0]] * 3 + [[2, -1]] * 6)
    ranks_TK = LpSplit([[0], [0, 1], [1, 2]]).ranks(ids_TK)
    assert ranks_TK[:3].tolist() == [[0, 1]] * 3
    assert ranks_TK[3:, 0].tolist() == [1] * 3 + [2] * 6 and (ranks_TK[6:, 1] == -1).all()


def test_rows_go_along_a_path_of_copies() -> None:
    """Rank 0 is full, and its rows can reach rank 3 only through ranks 1 and 2."""
    ranks_of = [[0], [0, 1], [1], [1, 2], [2], [2, 3]]
    assert loads_of(ranks_of, [8, 8, 0, 8, 0, 8]) == [8, 8, 8, 8]


def least_by_highs(counts_E: NDArray[np.float64], ranks_of: Ranks, num_ranks: int) -> float:
    """Returns the load of the busiest rank under the best split of divisible rows."""
    pairs = [(expert, rank) for expert, ranks in enumerate(ranks_of) for rank in ranks]
    expert_n, rank_n = np.array(pairs).T
    num_pairs = len(pairs)
    columns_n = np.arange(num_pairs)
    shares = csr_array((np.ones(num_pairs), (expert_n, columns_n)), (len(counts_E), num_pairs + 1))
    values = np.concatenate((np.ones(num_pairs), -np.ones(num_ranks)))
    rows = np.concatenate((rank_n, np.arange(num_ranks)))
    columns = np.concatenate((columns_n, np.full(num_ranks, num_pairs)))
    loads = csr_array((values, (rows, columns)), (num_ranks, num_pairs + 1))
    cost = np.zeros(num_pairs + 1)
    cost[-1] = 1.0
    found = linprog(cost, A_ub=loads, b_ub=np.zeros(num_ranks), A_eq=shares, b_eq=counts_E)
    assert found.status == 0, found.message
    return float(found.fun)


def test_a_whole_number_program_meets_highs() -> None:
    rng = np.random.default_rng(5)
    ranks_of = [[int(r) for r in rng.choice(8, 1 + (e < 16), replace=False)] for e in range(48)]
    counts_E = rng.zipf(1.5, 48).clip(0, 300)
    least = least_by_highs(counts_E.astype(float), ranks_of, 8)
    assert max(loads_of(ranks_of, counts_E.tolist())) == int(np.ceil(least - 1e-6))
