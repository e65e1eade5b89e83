"""The interfaces of batch policies and of the signatures they use. Policies never change tokens, as
a row depends on no row beside it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.stats import PolicyStats
from moe_serve.model.step_plan import MicroBatch, SequenceSlice


class BatchPolicy(Protocol):
    """The policy of one engine. Called on its thread in every step, so its time delays the step."""

    def prepare(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Prepares for a step that is about to be scheduled."""
        ...

    def candidates(self, waiting: Items[Sequence], running: Items[Sequence]) -> Iterable[Sequence]:
        """Returns the waiting sequences in the order in which they may start. The caller calls
        `started` for one before taking the next, and `is_next` for one that lacks pages."""
        ...

    def is_next(self, sequence: Sequence) -> bool:
        """Returns whether the last candidate, which lacks pages, holds back all others. Otherwise
        others would take the pages it waits for, again and again."""
        ...

    def started(self, sequence: Sequence) -> None:
        """Records that the last candidate runs now."""
        ...

    def split(self, slices: list[SequenceSlice], max_micro_batches: int) -> tuple[MicroBatch, ...]:
        """Splits a step's slices into at most `max_micro_batches` micro-batches, none of them
        empty."""
        ...

    def needed(self, slices: list[SequenceSlice]) -> NDArray[np.float32] | None:
        """Returns [L, E]: the probability that the slices need an expert, for an expert memory.
        None if there is no such memory or prediction."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops sequences that have ended or moved away."""
        ...

    def stats(self) -> PolicyStats: ...


class SignatureSource(Protocol):
    """Provides signatures from a predictor, or from the requests' past choices."""

    @property
    def is_on(self) -> bool:
        """True if the signatures are good enough to act on."""
        ...

    def refresh(self, waiting: Items[Sequence], running: Items[Sequence]) -> None:
        """Updates the table as far as the time of a step allows."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops sequences that have ended, also from the table."""
        ...

    @property
    def recall(self) -> float | None: ...

    @property
    def has_predictor(self) -> bool: ...

    @property
    def num_learnt(self) -> int | None:
        """Number of predictions learnt from; None if the source does not learn."""
        ...
