"""What one attention rank does in a step, and why nothing may come of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.cluster.control.messages import OpenSequence, PageWork, Slice
from moe_serve.engine.execute.step_executor import ExecutorLostError
from moe_serve.errors import MoeServeError
from moe_serve.model.step_plan import RouteAsk


class RankLostError(ExecutorLostError):
    """An attention rank is away: what it computed is gone."""


class StepFailedError(MoeServeError):
    """A rank could not compute its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """For the `start`-th process of a rank: another one does not know what it means."""

    start: int
    micro_batches: tuple[tuple[Slice, ...], ...] = ()
    opened: tuple[OpenSequence, ...] = ()
    closed: tuple[int, ...] = ()
    page_work: tuple[PageWork, ...] = ()
    after: int = 0  # the step whose tokens it goes on with, if that runs yet
    routes: RouteAsk | None = None
    needed_LE: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sum(piece.count for piece in batch) for batch in self.micro_batches)

    @property
    def again(self) -> RankWork:
        """The same step for a rank that has done what comes before it."""
        return replace(self, opened=(), closed=(), page_work=(), after=0)
