"""What a batch policy decides. It never changes tokens: a row depends on no row beside it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import MicroBatch, SequenceSlice

PolicyName = Literal["fifo", "balanced", "expert-aware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """A snapshot for the metrics; a policy fills it."""

    policy: PolicyName  # that decides now: a fallback shows
    num_passed_over: int = 0  # times that somebody who waited let a later one go first
    activated_experts: float | None = None  # expected in the last step's micro-batches, all layers
    recall: float | None = None  # of the predictor, as measured; None: not measured
    is_predictor_on: bool | None = None  # None: there is none
    num_learnt: int | None = None  # predictions that it learnt from; None: it does not learn


def sum_of(each: Items[PolicyStats], past: Items[PolicyStats] = ()) -> PolicyStats | None:
    """Of several engines, which share a predictor, and of those that are gone; None of none."""
    everyone = (*each, *past)
    if not everyone:
        return None
    known = [s.activated_experts for s in each if s.activated_experts is not None]
    return replace(
        everyone[0],
        num_passed_over=sum(s.num_passed_over for s in everyone),
        activated_experts=sum(known) if known else None,
    )


class BatchPolicy(Protocol):
    """One engine's. Called on its thread, every step: what it takes delays the step."""

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """A step is about to be scheduled."""
        ...

    def candidates(self, waiting: Items[Sequence], running: Items[Sequence]) -> Iterable[Sequence]:
        """Who waits, in the order in which they may start. Whoever takes one says `started` before
        asking for the next, and asks `is_next` of one that lacks pages."""
        ...

    def is_next(self, sequence: Sequence) -> bool:
        """Whether the candidate that was given last, which lacks pages, keeps all others back:
        else others take what it waits for, again and again."""
        ...

    def started(self, sequence: Sequence) -> None:
        """The candidate that was given last runs now."""
        ...

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        """A step's slices in at most so many micro-batches, none of them empty."""
        ...

    def needed(self, slices: list[SequenceSlice]) -> NDArray[np.float32] | None:
        """[L, E]: the probability that these need an expert, for an expert memory; None: nobody
        wants to know, or nobody does."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """These sequences have ended or moved away."""
        ...

    def stats(self) -> PolicyStats: ...
