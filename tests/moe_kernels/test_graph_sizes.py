"""The sizes that are recorded, and the recorded size that serves a step."""

from __future__ import annotations

import random

import pytest

from moe_kernels.graphs.graph_sizes import (
    GraphSize,
    GraphSizes,
    captured_rows,
    context_buckets,
    row_buckets,
    smallest,
)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 9)),
        (40, (1, 2, 4, 8, 16, 24, 32, 40)),
        (60, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 60)),
    ],
)
def test_numbers_of_rows(most: int, expected: tuple[int, ...]) -> None:
    assert row_buckets(most) == expected
    if most % 8 == 0:
        assert [captured_rows(n) for n in range(1, most + 1)] == [
            smallest(expected, n) for n in range(1, most + 1)
        ]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (100, (100,)),
        (512, (512,)),
        (513, (512, 513)),
        (40960, (512, 2048, 8192, 32768, 40960)),
    ],
)
def test_contexts(most: int, expected: tuple[int, ...]) -> None:
    assert context_buckets(most) == expected


def test_the_smallest_that_fits() -> None:
    sizes = GraphSizes(GraphSize(r, c) for r in row_buckets(24) for c in context_buckets(4000))
    assert sizes.choose(1, 1) == GraphSize(1, 512)
    assert sizes.choose(5, 5 * 512) == GraphSize(8, 512)
    assert sizes.choose(5, 5 * 512 + 1) == GraphSize(8, 2048), "one key more than 512 a row"
    assert sizes.choose(5, 2900) == GraphSize(8, 2048), "the example of the module"
    assert sizes.choose(24, 24 * 4000) == GraphSize(24, 4000)
    assert sizes.choose(25, 25) is None, "more rows than were recorded"
    assert sizes.choose(2, 8001) is None, "more keys than a sequence can have"


def test_what_is_not_recorded_is_not_chosen() -> None:
    sizes = GraphSizes([GraphSize(4, 512), GraphSize(8, 512), GraphSize(4, 2048)])
    assert (sizes.rows, sizes.contexts) == ((4, 8), (512, 2048))
    assert sizes.choose(3, 3000) == GraphSize(4, 2048)
    assert sizes.choose(5, 5000) is None, "8 rows were recorded for short contexts alone"
    assert GraphSizes([]).choose(1, 1) is None


def test_padding_with_the_shortest_row_fits_too() -> None:
    rng = random.Random(3)
    sizes = GraphSizes(GraphSize(r, c) for r in row_buckets(33) for c in context_buckets(3000))
    for _ in range(200):
        keys = [rng.randint(1, 3000) for _ in range(rng.randint(1, 33))]
        size = sizes.choose(len(keys), sum(keys))
        assert size is not None, f"{len(keys)} rows"
        padded = sum(keys) + (size.num_rows - len(keys)) * min(keys)
        assert padded <= size.num_keys, f"{padded} keys in {size}"
