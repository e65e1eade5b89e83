"""What a batch policy decides. It never changes tokens: a row depends on no row beside it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.policy_stats import PolicyStats
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import MicroBatch, SequenceSlice


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


class SignatureSource(Protocol):
    """Where signatures come from: a predictor, or what requests chose so far."""

    @property
    def is_on(self) -> bool:
        """Whether they are good enough to act on."""
        ...

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Bring the table up to date, as far as the time of a step allows."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """They have ended: out of the table too."""
        ...

    @property
    def recall(self) -> float | None: ...

    @property
    def has_predictor(self) -> bool: ...

    @property
    def num_learnt(self) -> int | None:
        """Predictions that were learnt from; None: nothing is learnt."""
        ...
