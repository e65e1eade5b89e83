"""The plan of a step's work. The scheduler makes it, and the pipeline reads it.

It holds no tensors or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [first, end) of a model of `total` layers."""

    first: int
    end: int
    total: int

    @property
    def is_last(self) -> bool:
        """Returns whether the last layer is in the range."""
        return self.end == self.total

    def rows(self, count: int) -> int:
        """Returns the number of rows through all layers that are as much work as `count` rows
        through these layers.
        """
        return -(-count * (self.end - self.first) // self.total)


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes: positions [start, start + len(token_ids)).

    `page_table` covers them. Logits are wanted for the last `num_logits` tokens: 0 while a prompt
    is still being read, 1 to sample, more for prompt log probabilities or to verify a draft. The
    last `num_drafted` tokens are not the sequence's own yet: a drafter expects them. `adapter` is
    the digest of the adapter that computes them (on ranks, its number); empty: the base model.

    With `layers`, the tokens take part in these layers only. Before the others their states are
    parked, and they want no logits before the last one.

    `page_table` may lack pages in its middle, whose `num_dropped` tokens these rows do not see.
    """

    sequence_id: int
    start: int
    token_ids: NDArray[np.int64]
    page_table: tuple[int, ...]
    num_logits: int
    num_drafted: int = 0
    layers: LayerRange | None = None
    adapter: bytes = b""
    num_dropped: int = 0

    @property
    def key_start(self) -> int:
        """Returns how many keys the first token sees, besides its own."""
        return self.start - self.num_dropped

    @property
    def is_finished(self) -> bool:
        """Returns whether the step takes the tokens through the last layer."""
        return self.layers is None or self.layers.is_last

    @property
    def drafted(self) -> list[int]:
        """The drafted tokens."""
        tokens: list[int] = self.token_ids[len(self.token_ids) - self.num_drafted :].tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that pass a layer together."""

    slices: tuple[SequenceSlice, ...]

    @property
    def is_grouped(self) -> bool:
        """Returns whether some of the sequences take part in some layers only."""
        return bool([piece for piece in self.slices if piece.layers is not None])

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)


@dataclass(frozen=True, slots=True)
class RouteAsk:
    """A request for the routers' choices for these sequences."""

    sequence_ids: frozenset[int]
    has_weights: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All micro-batches of a step, in the order in which their logits come back.

    `needed_LE`: the probability that the step needs an expert, by the layers with routed experts.
    The batch policy sets it for an expert memory only. `parked`: the sequences whose parked states
    are still needed, in this step or later.
    """

    micro_batches: tuple[MicroBatch, ...]
    routes: RouteAsk | None = None
    needed_LE: NDArray[np.float32] | None = field(default=None, compare=False)
    parked: tuple[int, ...] = ()
    num_guesses: int = 0  # tokens that a network guesses after each sampled token

    @property
    def slices(self) -> list[SequenceSlice]:
        if len(self.micro_batches) == 1:
            return [*self.micro_batches[0].slices]
        return [s for batch in self.micro_batches for s in batch.slices]

    @property
    def has_adapters(self) -> bool:
        return any(s.adapter for batch in self.micro_batches for s in batch.slices)

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.micro_batches)
