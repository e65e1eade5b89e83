"""Splits that balance token counts: longest first, into the smallest group (LPT)."""

from __future__ import annotations

from moe_serve.model.step_plan import MicroBatch, SequenceSlice


def split(slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
    """Splits slices so that token counts differ by at most one slice."""
    if len(slices) == 1:
        return (MicroBatch((slices[0],)),)
    if max_micro_batches == 1:
        return (MicroBatch(tuple(sorted(slices, key=lambda s: -len(s.token_ids)))),)
    groups: list[list[SequenceSlice]] = [[] for _ in range(min(max_micro_batches, len(slices)))]
    sizes = [0] * len(groups)
    for item in sorted(slices, key=lambda s: -len(s.token_ids)):
        index = sizes.index(min(sizes))
        groups[index].append(item)
        sizes[index] += len(item.token_ids)
    return tuple(MicroBatch(tuple(group)) for group in groups)


def split_evenly(slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
    """Splits with the same token counts, and balances the contexts among groups of equal count,
    because attention reads them."""
    if len(slices) == 1:
        return (MicroBatch((slices[0],)),)
    if max_micro_batches == 1:
        return (MicroBatch(tuple(sorted(slices, key=lambda s: (-len(s.token_ids), -s.start)))),)
    groups: list[list[SequenceSlice]] = [[] for _ in range(min(max_micro_batches, len(slices)))]
    sizes = [(0, 0)] * len(groups)
    for item in sorted(slices, key=lambda s: (-len(s.token_ids), -s.start)):
        index = sizes.index(min(sizes))
        groups[index].append(item)
        num_tokens, context = sizes[index]
        count = len(item.token_ids)
        sizes[index] = num_tokens + count, context + item.start + count
    return tuple(MicroBatch(tuple(group)) for group in groups)
