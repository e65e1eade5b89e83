"""The operator's interface to live balancing; `cluster/rebalance` implements it."""

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
    """Balance of the expert ranks: mean / max load, averaged over layers; None if unknown."""

    before: float | None = None  # of the placement that the last plan was to replace
    predicted: float | None = None  # of the last plan's placement
    achieved: float | None = None  # of the placement in force, from the rows counted since


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPlan:
    """The outcome of a plan, as a word and as a sentence."""

    outcome: PlanOutcome
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStatus:
    """A snapshot of live balancing, safe to take from any thread."""

    mode: RebalanceMode
    state: RebalanceState
    version: int
    age_s: float  # of this version
    num_counted_tokens: int  # in the open window
    balance: BalanceFigures
    last: LastPlan | None
    num_plans: Mapping[PlanOutcome, int]
    num_copies: int  # expert copies moved
    num_bytes: int  # read by ranks for these moves
    before_p99_s: float | None  # step time before the last move
    during_p99_s: float | None  # and during it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBrief:
    """The part of a status that is free to compute."""

    state: RebalanceState
    version: int
    age_s: float
    last: LastPlan | None
    num_plans: Mapping[PlanOutcome, int]


class PlacementControl(Protocol):
    """Controls the placement of one server."""

    @property
    def state(self) -> RebalanceState:
        """The state of a status, without computing the rest."""
        ...

    def status(self) -> PlacementStatus: ...

    def brief(self) -> PlacementBrief:
        """Returns the part of a status that does not inspect the loads."""
        ...

    def plan(self) -> Placement:
        """Returns the placement in force."""
        ...

    def rebalance(self) -> PlacementStatus:
        """Plans now and moves experts if that pays off, without waiting for the move. Raises
        RebalanceError with the reason if it cannot."""
        ...

    def apply(self, target: Placement) -> PlacementStatus:
        """Begins to move to a given placement; does not wait for the end.

        Raises RebalanceError, and changes nothing, if the placement does not fit this model and
        these ranks, if a rank has too few slots for it, or if a move is in progress."""
        ...
