"""The sample of a test's cases has every value, or every pair of values, and never changes."""

from __future__ import annotations

import itertools

import pytest

from tests.support.sampled_cases import EVERY_CASE, sample

CASES = [
    {"family": family, "kernels": kernels, "dtype": dtype}
    for family, kernels, dtype in itertools.product(range(9), range(2), range(3))
]


@pytest.mark.parametrize("start", [0, 7, 123456789])
def test_every_value_comes(start: int) -> None:
    kept = [CASES[index] for index in sample(CASES, start=start)]
    assert len(kept) == 9, "no more than the longest parameter has values"
    for name, count in (("family", 9), ("kernels", 2), ("dtype", 3)):
        assert {case[name] for case in kept} == set(range(count)), name
    counts = [sum(case["kernels"] == value for case in kept) for value in range(2)]
    assert max(counts) - min(counts) <= 1, f"one value is preferred: {counts}"
    assert sample(CASES, start=start) == sample(CASES, start=start)


def test_every_pair_comes() -> None:
    kept = [CASES[index] for index in sample(CASES, pairs=True)]
    assert len(kept) < len(CASES)
    for one, other in itertools.combinations(("family", "kernels", "dtype"), 2):
        pairs = {(case[one], case[other]) for case in CASES}
        assert {(case[one], case[other]) for case in kept} == pairs, f"{one} and {other}"


def test_one_case_is_kept() -> None:
    assert sample(CASES[:1]) == {0} == sample(CASES[:1], pairs=True)


@pytest.mark.sampled
@pytest.mark.parametrize("one", [0, 1, 2])
@pytest.mark.parametrize(("other", "third"), [(0, 0), (0, 1), (1, 0)])
def test_this_test_is_sampled(
    request: pytest.FixtureRequest, one: int, other: int, third: int
) -> None:
    own = request.node.nodeid.partition("[")[0]
    cases = [item for item in request.session.items if item.nodeid.partition("[")[0] == own]
    assert len(cases) <= (9 if EVERY_CASE else 3), f"{cases}"
    assert request.node in cases and {one, other, third} <= {0, 1, 2}
