"""A step in progress (the ranks that compute it, their work and results, and the reasons to repeat
it), and the interface through which an engine over several ranks steps.

`ClusterEngine` and `RemoteExecutor` know only `StepCoordinator`: the ranks behind it are processes
(`Coordinator`), a test's fake, or a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.cluster.control.messages import (
    OpenSequence,
    PageWork,
    QueryPages,
    RunStep,
    ServeStep,
    Slice,
    StepDone,
)
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.ranks.choice_packing import pack_needed
from moe_serve.cluster.steps.epoch_maker import Epoch
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import ExecutorLostError
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.sequence import Sequence
from moe_serve.errors import MoeServeError
from moe_serve.model.step_plan import RouteAsk
from moe_serve.pipeline.exchange.step_shape import RowsOfLayers


class RankLostError(ExecutorLostError):
    """An attention rank is lost, with everything it computed."""


class StepFailedError(MoeServeError):
    """A rank could not compute its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The work of one attention rank in a step, for its `start`-th process: a new process does not
    know the sequences."""

    start: int
    micro_batches: tuple[tuple[Slice, ...], ...] = ()
    opened: tuple[OpenSequence, ...] = ()
    closed: tuple[int, ...] = ()
    page_work: tuple[PageWork, ...] = ()
    after: int = 0  # the step whose tokens it needs, if that still runs
    routes: RouteAsk | None = None
    needed_LE: NDArray[np.float32] | None = field(default=None, compare=False)
    parked: tuple[int, ...] = ()
    num_guesses: int = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """Returns the rows of each micro-batch that take part in all layers."""
        return tuple(
            sum([piece.count for piece in batch if piece.layers is None])
            for batch in self.micro_batches
        )

    @property
    def has_some_layers(self) -> bool:
        """Returns True if some rows take part in some layers only."""
        return any(piece.layers is not None for batch in self.micro_batches for piece in batch)

    @property
    def some_layers(self) -> tuple[tuple[RowsOfLayers, ...], ...]:
        """Returns the other rows of each micro-batch, see `StepShape`."""
        return tuple(
            tuple(
                (piece.count, piece.layers.first, piece.layers.end)
                for piece in batch
                if piece.layers is not None
            )
            for batch in self.micro_batches
        )

    @property
    def again(self) -> RankWork:
        """Returns the same step for a rank that has already applied everything before it."""
        return replace(self, opened=(), closed=(), page_work=(), after=0)


@dataclass(slots=True)
class StepInFlight:
    """One attempt at a step."""

    step: int
    epoch: int
    works: dict[str, RankWork]
    start: float  # on the coordinator's clock
    waiting: set[str]
    results: dict[str, StepDone | Exception] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)  # why it must be repeated
    is_sent: bool = True  # False: `collect` sends it

    @property
    def is_broken(self) -> bool:
        return bool(self.troubles)

    @property
    def is_sound(self) -> bool:
        """Returns True if, according to their reports, all ranks in it have finished it."""
        return not self.troubles and all(isinstance(r, StepDone) for r in self.results.values())

    @property
    def left(self) -> dict[str, RankWork]:
        """Returns the work to repeat, once the step waits for no rank."""
        return {n: work.again for n, work in self.works.items() if n not in self.results}

    def void(self, name: str) -> None:
        """Drops a rank from the step, because its result is no longer needed."""
        del self.works[name]

    def break_up(self, why: str) -> None:
        """Notes why the step must be repeated, each reason once: all peers report a lost rank."""
        if why not in self.troubles:
            self.troubles.append(why)

    @property
    def why(self) -> str:
        return "; ".join(self.troubles)

    def describe(self, now: float) -> str:
        """Describes the step for a hang report. Safe from any thread."""
        seconds = now - self.start
        num_tokens = sum(sum(work.rows) for work in list(self.works.values()))
        return (
            f"step {self.step} was sent out {seconds:.1f} s ago with {num_tokens} tokens; it waits "
            f"for {', '.join(sorted(self.waiting)) or 'no rank'}"
        )


def step_orders(
    flight: StepInFlight, epoch: Epoch, placement: int
) -> dict[str, RunStep | ServeStep]:
    """Returns the orders of a step by rank, those of the expert ranks first. `placement`: the
    version that all of them must have."""
    works = flight.works
    head: dict[str, Any] = {
        "epoch": epoch.number,
        "step": flight.step,
        "rows": [works[name].rows if name in works else () for name in epoch.attention],
        "placement": placement,
    }
    if any(work.has_some_layers for work in works.values()):
        each = [works[name].some_layers if name in works else () for name in epoch.attention]
        head["some_layers"] = each
    needed = pack_needed(work.needed_LE for work in works.values())
    orders: dict[str, RunStep | ServeStep] = {
        name: ServeStep(**head, needed=needed) for name in epoch.experts
    }
    for name, work in works.items():
        orders[name] = RunStep(
            **head,
            micro_batches=work.micro_batches,
            opened=work.opened,
            closed=work.closed,
            page_work=work.page_work,
            after=work.after,
            routes=work.routes,
            parked=work.parked,
            num_guesses=work.num_guesses,
        )
    return orders


MAX_MOVES = 5  # in a row, without a new token


class RequestMoves:
    """Counts how often a sequence has moved from a lost rank since its last token.

    A request that kills every rank that it runs on must end.
    """

    def __init__(self) -> None:
        self._moved: dict[int, tuple[int, int]] = {}  # sequence -> its tokens then, moves

    def is_allowed(self, sequence: Sequence) -> bool:
        """Counts a loss of the rank that computed the sequence; returns True if it may move on."""
        num_tokens, count = self._moved.get(sequence.id, (0, 0))
        count = count + 1 if num_tokens == sequence.num_tokens else 1
        self._moved[sequence.id] = (sequence.num_tokens, count)
        while len(self._moved) > 4096:  # entries of sequences that ended long ago
            del self._moved[next(iter(self._moved))]
        return count <= MAX_MOVES


def given_up(sequence: Sequence) -> TokenDelta:
    """Returns the end of a request that `RequestMoves` does not allow to move on."""
    return TokenDelta(
        request_id=sequence.request.request_id,
        finish_reason=FinishReason.ERROR,
        num_preemptions=sequence.num_preemptions,
        error=f"{MAX_MOVES + 1} attention ranks were lost while they computed its next token",
    )


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


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step in progress, and the engines in it. By its end a rank may have another engine."""

    flight: StepInFlight
    engines: dict[str, Engine]
    at: float = 0.0  # when it was sent out, with service tiers


class StepCoordinator(Protocol):
    """Drives the steps of several ranks. One thread uses it at a time, the engine's or the one that
    waits for it; `stop` and `outage_s` are safe from any thread.
    """

    @property
    def membership(self) -> Members: ...

    @property
    def epoch(self) -> Epoch:
        """The ranks that step together now."""
        ...

    @property
    def has_events(self) -> bool:
        """True if `settle` has something to do."""
        ...

    @property
    def outage_s(self) -> float:
        """The seconds for which no step could be computed; 0 while one can."""
        ...

    def stop(self) -> None:
        """Ends the wait for lost ranks, and soon that for answers."""
        ...

    def is_in(self, name: str, start: int) -> bool:
        """Returns True if the `start`-th process of a rank is in the epoch, and the epoch's
        requests need not move to other cells because of a long outage.
        """
        ...

    def settle(self, *, is_patient: bool) -> bool:
        """Handles joins and losses; returns True if a step can be computed. If `is_patient`, waits
        until one can."""
        ...

    def look(self) -> bool:
        """Handles the reports of ranks without waiting. Returns False if `settle` would wait."""
        ...

    def launch(self, works: Mapping[str, RankWork], *, can_wait: bool = True) -> StepInFlight:
        """Sends a step out to the attention ranks that are there. With `can_wait` false, a step
        that would have to wait is sent by `collect`."""
        ...

    def can_follow(self, flight: StepInFlight) -> bool:
        """Returns True if the next step can be sent out before this one has ended."""
        ...

    def launch_after(self, flight: StepInFlight, works: Mapping[str, RankWork]) -> StepInFlight:
        """Sends out the next step of the same ranks while this one runs."""
        ...

    def collect(self, flight: StepInFlight) -> dict[str, StepDone | Exception]:
        """Waits for a step's end. Returns each attention rank's tokens or, instead, the error:
        RankLostError if the rank is lost.
        """
        ...

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        """Runs one step on some attention ranks: `launch` and `collect`."""
        ...

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        """Returns which pages of a rank are finite; raises RankLostError."""
        ...
