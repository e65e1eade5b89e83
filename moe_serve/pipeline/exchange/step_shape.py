"""The plan of a step that all ranks know before it begins: the senders, their numbers of rows, and
the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows[a][i]` is the number of tokens in attention rank a's micro-batch i.

    A rank may have fewer micro-batches than others, or none; missing ones are not exchanged.
    """

    epoch: int
    step: int
    rows: tuple[tuple[int, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return max((len(rows) for rows in self.rows), default=0)

    def planned(self, attention_rank: int, micro_batch: int) -> int:
        """Return the rows of one exchange; 0 means that it does not take place."""
        rows = self.rows[attention_rank]
        return rows[micro_batch] if micro_batch < len(rows) else 0

    def senders(self, micro_batch: int) -> list[int]:
        """Return the attention ranks that have this micro-batch."""
        return [a for a in range(len(self.rows)) if self.planned(a, micro_batch)]


def exchange_order(layers: Sequence[int], num_micro_batches: int) -> list[tuple[int, int]]:
    """Return (layer, micro-batch) pairs in the order in which every rank processes them."""
    return [(layer, index) for layer in layers for index in range(num_micro_batches)]


def dispatch_tag(layer: int, micro_batch: int) -> int:
    """Return the tag of rows on their way to the experts;
    their sums come back with the next tag.
    """
    return 2 * (layer * 8 + micro_batch)


def combine_tag(layer: int, micro_batch: int) -> int:
    return dispatch_tag(layer, micro_batch) + 1
