"""What a server's operator sees and asks of live balancing; `cluster/rebalance` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from experts.placement.problem.placement import Placement

RebalanceMode = Literal["off", "manual", "auto"]
RebalanceState = Literal["idle", "planning", "copying"]
PlanOutcome = Literal["moved", "aborted", "window", "gain", "nothing", "away", "planner"]
OUTCOMES: tuple[PlanOutcome, ...] = (
    "moved",
    "aborted",
    "window",
    "gain",
    "nothing",
    "away",
    "planner",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceFigures:
    """Mean over max load of the expert ranks, mean over layers; None: not known yet."""

    before: float | None = None  # of the last plan: the placement that it was to replace
    predicted: float | None = None  # of the last plan: itself
    achieved: float | None = None  # of the placement in force, by what was counted since


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPlan:
    """What came of a plan, in a word and in a sentence."""

    outcome: PlanOutcome
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """A snapshot, from any thread."""

    mode: RebalanceMode
    state: RebalanceState
    version: int
    age_s: float  # of this version
    num_counted_tokens: int  # in the window that is open
    balance: BalanceFigures
    last: LastPlan | None
    num_plans: Mapping[PlanOutcome, int]
    num_copies: int  # of experts, that were moved
    num_bytes: int  # that ranks read for it
    before_p99_s: float | None  # of steps, before the last move
    during_p99_s: float | None  # and during it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBrief:
    """The part of a status that costs nothing."""

    state: RebalanceState
    version: int
    age_s: float
    last: LastPlan | None
    num_plans: Mapping[PlanOutcome, int]


class PlacementControl(Protocol):
    """Of one server."""

    @property
    def state(self) -> RebalanceState:
        """Of a status, at once."""
        ...

    def status(self) -> PlacementStatus: ...

    def brief(self) -> PlacementBrief:
        """Of a status, what needs no look at the loads."""
        ...

    def plan(self) -> Placement:
        """The placement in force."""
        ...

    def rebalance(self) -> PlacementStatus:
        """Plan now, and move if that is worth it; does not wait for the end. Raises RebalanceError
        with why not."""
        ...
