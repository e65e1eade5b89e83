"""The interface through which an engine over several ranks steps.

`ClusterEngine` and `RemoteExecutor` know only this: the ranks behind it are processes
(`Coordinator`), a test's fake, or a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from moe_serve.cluster.control.messages import QueryPages, StepDone
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.steps.epoch_maker import Epoch
from moe_serve.cluster.steps.step_in_flight import RankWork, StepInFlight


class Members(Protocol):
    """The ranks that belong to the engine, there or not. `Membership` implements it."""

    on_event: Callable[[], None]  # called on any thread when a rank came or went

    @property
    def roster(self) -> Roster: ...

    @property
    def num_lost(self) -> int:
        """Number of ranks lost since the start."""
        ...

    @property
    def last_loss(self) -> str:
        """The rank that was lost last, and why; empty if none was."""
        ...


class StepCoordinator(Protocol):
    """Used by the engine's thread only, except `stop` and `outage_s`."""

    @property
    def membership(self) -> Members: ...

    @property
    def epoch(self) -> Epoch:
        """The ranks that step together now."""
        ...

    @property
    def has_events(self) -> bool:
        """Whether `settle` has something to do."""
        ...

    @property
    def outage_s(self) -> float:
        """For how many seconds no step could be computed; 0 while one can."""
        ...

    def stop(self) -> None:
        """Ends the wait for lost ranks, and soon that for answers."""
        ...

    def is_in(self, name: str, start: int) -> bool:
        """Returns True if the `start`-th process of a rank is in the epoch."""
        ...

    def settle(self, *, is_patient: bool) -> bool:
        """Handles joins and losses; returns True if a step can be computed. If `is_patient`, waits
        until one can."""
        ...

    def launch(self, works: Mapping[str, RankWork]) -> StepInFlight:
        """Sends a step out to the attention ranks that are there."""
        ...

    def can_follow(self, flight: StepInFlight) -> bool:
        """Returns True if the next step can be sent out before this one has ended."""
        ...

    def launch_after(self, flight: StepInFlight, works: Mapping[str, RankWork]) -> StepInFlight:
        """Sends out the next step of the same ranks while this one runs."""
        ...

    def collect(self, flight: StepInFlight) -> dict[str, StepDone | Exception]:
        """Waits for a step's end; returns each attention rank's tokens, or the error instead.
        RankLostError: the rank is lost."""
        ...

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        """Runs one step on some attention ranks: `launch` and `collect`."""
        ...

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        """Returns which pages of a rank are finite; raises RankLostError."""
        ...
