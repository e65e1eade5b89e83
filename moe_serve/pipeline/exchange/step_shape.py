"""The plan of a step that all ranks know before it begins: the senders, their numbers of rows, and
the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RowsOfLayers = Sequence[int]  # number of tokens, their first layer, the layer behind their last


@dataclass(frozen=True, slots=True)
class StepShape:
    """`rows[a][i]` is the number of tokens in attention rank a's micro-batch i.

    A rank may have fewer micro-batches than others, or none; missing ones are not exchanged.
    `some_layers[a][i]`: further tokens, which take part in some layers only; empty: there are none.
    """

    epoch: int
    step: int
    rows: tuple[tuple[int, ...], ...]
    some_layers: Sequence[Sequence[Sequence[RowsOfLayers]]] = ()

    @property
    def num_micro_batches(self) -> int:
        return max((len(rows) for rows in self.rows), default=0)

    def planned(self, attention_rank: int, micro_batch: int, layer: int) -> int:
        """Returns the rows of one exchange; 0 means that it does not take place."""
        rows = self.rows[attention_rank]
        if micro_batch >= len(rows):
            return 0
        count = rows[micro_batch]
        for more in self.some_layers[attention_rank][micro_batch] if self.some_layers else ():
            count += more[0] if more[1] <= layer < more[2] else 0
        return count

    def senders(self, micro_batch: int, layer: int) -> list[int]:
        """Returns the attention ranks that have rows in this micro-batch and layer."""
        return [a for a in range(len(self.rows)) if self.planned(a, micro_batch, layer)]


def exchange_order(layers: Sequence[int], num_micro_batches: int) -> list[tuple[int, int]]:
    """Returns (layer, micro-batch) pairs in the order in which every rank processes them."""
    return [(layer, index) for layer in layers for index in range(num_micro_batches)]


def dispatch_tag(layer: int, micro_batch: int) -> int:
    """Returns the tag of rows on their way to the experts;
    their sums come back with the next tag.
    """
    return 2 * (layer * 8 + micro_batch)


def combine_tag(layer: int, micro_batch: int) -> int:
    return dispatch_tag(layer, micro_batch) + 1
