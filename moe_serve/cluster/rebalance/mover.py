"""Moves from one placement to another while steps continue: copies run beside the steps, and
switches between them.

idle -> copying -> switch -> copying (the next round) -> switch -> idle
           '-- a rank is lost, joins, cannot read or takes too long: dropped -> idle
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from experts.placement.problem.placement import Placement
from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.cluster.control.messages import Order
from moe_serve.cluster.control.placement_messages import (
    DropPlacement,
    Staged,
    StagePlacement,
    SwitchPlacement,
)
from moe_serve.cluster.members.current_placement import CurrentPlacement
from moe_serve.cluster.members.roster import RankPhase, Roster
from moe_serve.cluster.rebalance.rounds import Round, rounds

_MOST_BEFORE, _MOST_DURING = 512, 8192  # steps kept
_LEAST = 20  # fewer steps give no percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStall:
    """Seconds of the slowest step in a hundred; None: there were too few steps."""

    before_p99_s: float | None = None
    during_p99_s: float | None = None


class MoveStepTimes:
    """Keeps step times before and during a move. The engine thread writes; any thread may read
    `stall`."""

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=_MOST_BEFORE)
        self._moving: deque[float] = deque(maxlen=_MOST_DURING)
        self._is_moving = False
        self.stall = MoveStall()  # of the last move

    def add(self, seconds: float) -> None:
        """Adds the time of a step that succeeded."""
        (self._moving if self._is_moving else self._calm).append(seconds)

    def begin(self) -> None:
        """Notes that a move begins."""
        self._moving.clear()
        self._is_moving = True

    def end(self) -> None:
        self._is_moving = False
        self.stall = MoveStall(before_p99_s=_p99(self._calm), during_p99_s=_p99(self._moving))


def _p99(seconds: deque[float]) -> float | None:
    return float(np.percentile(list(seconds), 99)) if len(seconds) >= _LEAST else None


_log = logging.getLogger(__name__)

_SLACK, _LEAST_S = 10.0, 60.0  # a round may take _LEAST_S, plus _SLACK times its bytes' time

SendOrder = Callable[[str, Order], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveEnd:
    """The result of a move. `why` is the reason why its current round was cancelled."""

    why: str | None
    num_rounds: int  # rounds that ended with a switch
    num_copies: int  # copies of these rounds
    seconds: float
    is_refused: bool = False  # not begun: a rank is away, or experts have moved since


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverLimits:
    """The limits of ranks during a move."""

    room: int  # copies that each can hold beside its own experts
    bytes_per_s: float  # read rate of each
    expert_bytes: int  # at most, of one expert


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A plan in rounds, and the version it starts from."""

    base: int
    rounds: list[Round]


@dataclass(slots=True)
class _OngoingMove:
    """A plan that is being carried out."""

    left: deque[Round]  # the first is being prepared
    began: float
    number: int = 0  # of its placement; 0: no rank was told of one
    waiting: set[str] = field(default_factory=set)  # ranks that are not ready for it
    deadline: float = 0.0
    num_rounds: int = 0  # rounds that are over
    num_moved: int = 0  # copies of these rounds


class Mover:
    """Used by the engine thread, between steps. Any thread may use `propose`, `is_moving`,
    `has_news` and the counts."""

    def __init__(
        self,
        roster: Roster,
        send: SendOrder,
        current: CurrentPlacement,
        limits: MoverLimits,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._roster, self._send, self._current = roster, send, current
        self._limits, self._clock = limits, clock
        self._proposals: queue.SimpleQueue[_Proposal] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._move: _OngoingMove | None = None
        self.on_end: Callable[[MoveEnd], None] = lambda end: None
        self.times = MoveStepTimes()
        self.num_bytes = 0  # read by ranks, since the start
        self.num_copies = 0  # copies switched to

    def propose(self, target: Placement) -> None:
        """Requests a move to this placement. Safe from any thread, which then computes the rounds.
        Raises PlacementError if ranks lack the room for it.
        """
        version = self._current.version
        found = rounds(version.placement, target, self._limits.room)
        self._proposals.put(_Proposal(version.number, found))

    @property
    def is_moving(self) -> bool:
        return self._move is not None

    @property
    def has_news(self) -> bool:
        """Returns True if `advance` has something to do without another report. Safe from any
        thread.
        """
        move = self._move
        if move is None:
            return not self._proposals.empty()
        return not move.waiting or self._is_late(move)

    def heard(self, name: str, staged: Staged) -> None:
        """Notes that a rank is ready, or cannot be."""
        move = self._move
        if move is None or staged.placement != move.number or name not in move.waiting:
            return  # it belongs to a cancelled move
        self.num_bytes += staged.num_bytes
        if staged.why is not None:
            self.call_off(f"{name} could not read an expert: {staged.why}")
            return
        move.waiting.discard(name)

    def advance(self) -> None:
        """Begins a move or switches, if that can be done now. Call it between two steps, with every
        rank of the epoch at that point."""
        if self._move is None and not self._proposals.empty():
            self._begin(self._proposals.get())
            return
        move = self._move
        if move is None:
            return
        if not move.waiting:
            self._switch(move)
        elif self._is_late(move):
            names = ", ".join(sorted(move.waiting))
            self.call_off(f"{names} did not read its experts in time")

    def _is_late(self, move: _OngoingMove) -> bool:
        return self._clock() > move.deadline

    def call_off(self, why: str) -> None:
        """Cancels the current round: all ranks serve by the placement in force. Earlier rounds
        stay.
        """
        move = self._move
        if move is None:
            return
        for state in self._roster.present():
            self._send(str(state.name), DropPlacement())
        self._end(move, why)

    def _begin(self, proposal: _Proposal) -> None:
        self._move = move = _OngoingMove(left=deque(proposal.rounds), began=self._clock())
        away = [str(s.name) for s in self._roster.all() if s.phase is not RankPhase.SERVING]
        if away:
            self._end(move, f"{', '.join(away)} is away", is_refused=True)
        elif proposal.base != self._current.version.number:
            self._end(move, "experts have moved since the plan was made", is_refused=True)
        else:
            self.times.begin()
            self._stage(move)

    def _stage(self, move: _OngoingMove) -> None:
        """Tells all ranks about the next round."""
        if not move.left:
            self._end(move, None)
            return
        following = move.left[0]
        move.number = next(self._numbers)
        move.waiting = set(self._roster.states)
        move.deadline = self._clock() + self._seconds_allowed(following.most_copies)
        for state in self._roster.all():
            is_expert = state.name.role == "expert"
            order = StagePlacement(
                placement=move.number,
                ranks_of=following.ranks_of,
                held=following.held[state.name.index] if is_expert else {},
                gained=following.gained[state.name.index] if is_expert else {},
                bytes_per_s=self._limits.bytes_per_s,
            )
            self._send(str(state.name), order)

    def _seconds_allowed(self, num_copies: int) -> float:
        limits = self._limits
        return _LEAST_S + _SLACK * num_copies * limits.expert_bytes / limits.bytes_per_s

    def _switch(self, move: _OngoingMove) -> None:
        """Switches to the staged placement. From here on it is in force, even if a rank is lost."""
        ended = move.left.popleft()
        self._current.switch(move.number, ended.placement)
        for name in self._roster.states:
            self._send(name, SwitchPlacement(placement=move.number))
        move.num_rounds += 1
        move.num_moved += ended.num_copies
        self.num_copies += ended.num_copies
        _log.info("placement %d: %d copies moved", move.number, ended.num_copies)
        self._stage(move)

    def _end(self, move: _OngoingMove, why: str | None, *, is_refused: bool = False) -> None:
        self._move = None
        if move.number:
            self.times.end()
        end = MoveEnd(
            why=why,
            num_rounds=move.num_rounds,
            num_copies=move.num_moved,
            seconds=self._clock() - move.began,
            is_refused=is_refused,
        )
        self.on_end(end)
