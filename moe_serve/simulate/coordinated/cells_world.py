"""Lets cells under one coordinator serve requests: an event loop over arrivals, steps and parcels.

The loop decides nothing that a server decides. `Moves` routes requests to cells and hands them over,
`Autoscaler` says how many cells there should be, and the engines schedule. The loop tells them what
happened when, in the order in which the server's own loop does:

    arrival:          Moves.add
    end of a step:    engine.end, Moves.after_step
    parcels arrive:   Moves.turn
    then each cell without a step, if it has work:    Moves.before_step, engine.begin
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moe_serve.engine.request.request import TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.simulate.coordinated.coordinated_cell import CoordinatedCell
from moe_serve.simulate.coordinated.instant_carrier import InstantCarrier
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest, StepsDone, request_of
from moe_serve.simulate.virtual_clock import VirtualClock
from moe_serve.simulate.world import without_collections

_ARRIVAL, _END, _PARCEL, _OTHER = 0, 1, 2, 3  # the order of events at one moment


class CellMoves(Protocol):
    """What the loop uses of `Moves`."""

    def add(self, sequence: EngineSequence) -> None: ...

    def before_step(self, cell: CoordinatedCell) -> None: ...

    def after_step(self, cell: CoordinatedCell) -> None: ...

    def turn(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...


class Schedule(Protocol):
    """Something that happens at times of its own, such as starts and ends of cells."""

    @property
    def next_s(self) -> float | None:
        """When it happens next; None: never."""
        ...

    def advance_to(self, now: float) -> None:
        """Lets happen what is due."""
        ...
