"""The work of an attention rank in a step, in the numbers that its cost depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.model.step_plan import SequenceSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Rows of one attention rank, in a step or in one of its micro-batches.

    Keys are read once per sequence (bytes) and multiplied once per row (work). In decode both are
    the sum of the contexts; in prefill the second is far larger.
    """

    num_rows: int
    num_sequences: int
    num_kv_tokens: int  # sum of the sequences' contexts after the step
    num_pairs: int  # (row, key) pairs: sum of every row's own context
    num_largest: int  # rows of the sequence with the most rows

    @staticmethod
    def of(slices: Sequence[SequenceSlice]) -> BatchLoad:
        counts = [len(s.token_ids) for s in slices]
        starts = [s.start for s in slices]
        return BatchLoad(
            num_rows=sum(counts),
            num_sequences=len(counts),
            num_kv_tokens=sum(starts) + sum(counts),
            num_pairs=sum(
                count * start + count * (count + 1) // 2
                for start, count in zip(starts, counts, strict=True)
            ),
            num_largest=max(counts, default=0),
        )

    @staticmethod
    def decode(num_sequences: int, context: int) -> BatchLoad:
        """Return the load of a decode step: one row of each sequence."""
        num_kv_tokens = num_sequences * context
        return BatchLoad(
            num_rows=num_sequences,
            num_sequences=num_sequences,
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_kv_tokens,
            num_largest=min(1, num_sequences),
        )

    def split(self, num_parts: int) -> tuple[BatchLoad, ...]:
        """Estimate the batcher's split: longest sequence first, into the smallest group.

        A sequence is never cut: one that is longer than its share gets a micro-batch of its own.
        """
        if num_parts == 1:
            return (self,)
        first = max(self.num_largest, -(-self.num_rows // num_parts))
        parts, rows, sequences = [], self.num_rows, self.num_sequences
        for left in range(num_parts, 0, -1):
            share = first if left == num_parts else -(-rows // left)
            is_alone = share == self.num_largest
            part_sequences = min(sequences, 1 if is_alone else -(-sequences // left))
            parts.append(self._part(min(share, rows), part_sequences))
            rows -= min(share, rows)
            sequences -= part_sequences
        return tuple(parts)

    def _part(self, rows: int, sequences: int) -> BatchLoad:
        return BatchLoad(
            num_rows=rows,
            num_sequences=sequences,
            num_kv_tokens=self.num_kv_tokens * sequences // max(1, self.num_sequences),
            num_pairs=self.num_pairs * rows // max(1, self.num_rows),
            num_largest=min(rows, self.num_largest),
        )
