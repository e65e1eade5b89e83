"""Loads count the parts of a step that cost time, and split about as the batcher does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.engine.schedule.policy.longest_first import split
from moe_serve.model.step_plan import SequenceSlice
from moe_serve.pipeline.costs.step_costs import BatchLoad


def slice_of(start: int, count: int) -> SequenceSlice:
    return SequenceSlice(0, start, np.zeros(count, dtype=np.int64), (), 1)


def test_of_counts_keys_once_per_sequence_and_once_per_row() -> None:
    load = BatchLoad.of([slice_of(10, 3), slice_of(99, 1)])
    assert load == BatchLoad(
        num_rows=4,
        num_sequences=2,
        num_kv_tokens=13 + 100,
        num_pairs=11 + 12 + 13 + 100,
        num_largest=3,
    ), load


def test_decode_is_one_row_of_each() -> None:
    assert BatchLoad.decode(5, 100) == BatchLoad.of([slice_of(99, 1)] * 5)
    assert BatchLoad.decode(0, 100).num_rows == 0


def test_a_long_chunk_has_a_micro_batch_of_its_own() -> None:
    load = BatchLoad.of([slice_of(0, 100), *[slice_of(50, 1)] * 8])
    assert [(p.num_rows, p.num_sequences) for p in load.split(3)] == [(100, 1), (4, 4), (4, 4)]


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=20), num_parts=st.integers(1, 4))
def test_parts_add_up_and_the_largest_is_near_the_batchers(
    counts: list[int], num_parts: int
) -> None:
    slices = [slice_of(7, count) for count in counts]
    parts = BatchLoad.of(slices).split(num_parts)
    assert len(parts) == num_parts
    assert sum(p.num_rows for p in parts) == sum(counts), parts
    assert sum(p.num_sequences for p in parts) <= len(counts), parts
    largest = max(p.num_rows for p in parts)
    real = max(batch.num_tokens for batch in split(slices, num_parts))
    # LPT is within 4/3 of the best cut (Graham 1969), and no cut is below the bound taken here.
    assert largest <= real <= max(4 / 3 * largest, largest + max(counts)), (parts, real)
