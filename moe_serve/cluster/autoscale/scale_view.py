"""The load of a deployment as a policy of autoscaling sees it, and the interface of policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from moe_serve.config.cells import CellRole

CellCounts = Mapping[CellRole, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """The cells of one role. `utilisation` is the mean number of requests that were in progress or
    waiting in the last interval, divided by the number of requests that the serving cells run at
    once.
    """

    num_serving: int
    num_starting: int
    num_draining: int
    num_requests: int  # now in progress or waiting
    utilisation: float

    @property
    def num_cells(self) -> int:
        """Cells that serve or will serve."""
        return self.num_serving + self.num_starting


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleView:
    """The load of the last interval, and the cells now.

    `num_arrived` requests arrived in the interval, with `prompt_tokens` that no cache had.
    `num_ended` requests ended in it, with `output_tokens` in their answers.
    """

    at_s: float
    interval_s: float
    num_arrived: int
    prompt_tokens: int
    num_ended: int
    output_tokens: int
    start_s: float  # until a new cell serves
    roles: Mapping[CellRole, RoleLoad]

    @property
    def horizon_s(self) -> float:
        """The seconds until cells that are started now have served for one interval."""
        return self.start_s + self.interval_s


class AutoscalePolicy(Protocol):
    """Decides how many cells are wanted. A policy may remember earlier views."""

    @property
    def name(self) -> str: ...

    def decide(self, view: ScaleView) -> CellCounts:
        """Returns the cells wanted of each role in the view; limits are applied to them later."""
        ...
