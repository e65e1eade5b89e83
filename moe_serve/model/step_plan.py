"""The work of a step: made by the scheduler, read by the pipeline.

It holds no tensors or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes: positions [start, start + len(token_ids)).

    `page_table` covers them. Logits are wanted for the last `num_logits` tokens: 0 while a prompt
    is still being read, 1 to sample, more for prompt log probabilities or to verify a draft. The
    last `num_drafted` tokens are not the sequence's own yet: a drafter expects them. `adapter` is
    the digest of the adapter that computes them; empty: the base model.
    """

    sequence_id: int
    start: int
    token_ids: NDArray[np.int64]
    page_table: tuple[int, ...]
    num_logits: int
    num_drafted: int = 0
    adapter: bytes = b""

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
    The batch policy sets it for an expert memory only.
    """

    micro_batches: tuple[MicroBatch, ...]
    routes: RouteAsk | None = None
    needed_LE: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def slices(self) -> list[SequenceSlice]:
        return [s for batch in self.micro_batches for s in batch.slices]

    @property
    def has_adapters(self) -> bool:
        return any(s.adapter for batch in self.micro_batches for s in batch.slices)

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.micro_batches)
