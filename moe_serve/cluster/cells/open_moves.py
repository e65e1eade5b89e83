"""The moves in progress: begins them, lets their sequences depart and arrive, and ends them.

A sequence belongs to exactly one engine, or is between two engines, or has no home. Every end of a
move is in `end` or in `land`, so it happens once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from moe_serve.clock import Clock
from moe_serve.cluster.cells.move import CellMove
from moe_serve.cluster.cells.places import CellLike, Place
from moe_serve.cluster.cells.rates import LinkRates
from moe_serve.cluster.parcels.parcel import Lease, PageCarrier, ParcelEnd
from moe_serve.engine.execute.step_executor import ExecutorLostError
from moe_serve.engine.request.moves_stats import MoveKind, MoveResult, MovesCounter
from moe_serve.engine.request.sequence import Sequence

_FEW_PAGES = 2  # pages that may travel between two engines, however long it takes
_PAUSE_S = 1.0  # between two moves of a sequence
_FAILED_PAUSE_S = 30.0  # after a failed parcel: the sequence may be the cause
_MOST_REMEMBERED = 4096


class OpenMoves:
    """Used by the engine's thread."""

    def __init__(
        self, carrier: PageCarrier, clock: Clock, links: LinkRates, timeout_s: float
    ) -> None:
        self._carrier, self._clock, self._links = carrier, clock, links
        self._timeout_s = timeout_s
        self._moves: dict[int, CellMove] = {}  # by sequence id
        self._leases = itertools.count(1)
        self._next_at: dict[int, float] = {}  # when a sequence may move again
        # Departed ones that have failed, for the caller to place.
        self.homeless: list[CellMove] = []
        self.counter = MovesCounter(carrier.page_bytes)

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[CellMove]:
        return iter(list(self._moves.values()))

    def of(self, sequence: Sequence) -> CellMove | None:
        return self._moves.get(sequence.id)

    @property
    def between(self) -> list[CellMove]:
        """The moves whose sequences belong to no engine."""
        return [move for move in self if move.has_departed]

    def may_begin(self, sequence: Sequence) -> bool:
        """Returns whether a sequence may move: it is not moving, and has not moved for a second."""
        if sequence.id in self._moves or not sequence.is_sound:
            return False
        now = self._clock()
        return now >= self._next_at.get(sequence.id, now)

    def begin(self, sequence: Sequence, kind: MoveKind, source: Place, target: Place) -> bool:
        """Opens a lease at the target; False if it has no room now."""
        is_idle = not target.cell.is_out and not target.engine.step_sequences
        try:
            reservation = target.engine.moving.reserve(sequence, may_wait=is_idle)
        except ExecutorLostError:  # its cell will notice the loss
            return False
        if reservation is None:
            return False
        lease = Lease(next(self._leases), sequence.id)
        move = CellMove(
            sequence=sequence,
            kind=kind,
            source=source,
            target=target,
            lease=lease,
            reservation=reservation,
            next_place=reservation.num_shared,
            moved_at=self._clock(),
        )
        self._moves[sequence.id] = move
        self.counter.begun(kind)
        return True

    def advance(self, move: CellMove, step_s: float) -> None:
        """Sends the pages that have become full, and lets the sequence depart between two steps if
        that is all there is to wait for. `step_s`: a predicted step of the source. May raise
        ExecutorLostError, if the source is lost."""
        sequence, moving = move.sequence, move.source.engine.moving
        if self._end_with_request(move):
            return
        is_wanted = sequence.is_running and not move.target.cell.is_draining
        if not is_wanted or not self._has_room(move):
            self.end(move, "stayed")
            return
        move.send(self._carrier, self._clock())
        if not self._is_near(move, step_s):
            return
        moving.announce(sequence)
        if moving.can_depart(sequence) and sequence.id not in move.source.engine.step_sequences:
            self._depart(move)

    def take(self, end: ParcelEnd) -> None:
        """Takes the end of a parcel. It is dropped if its lease has ended."""
        move = self._moves.get(end.parcel.lease.sequence_id)
        is_known = move is not None and move.lease == end.parcel.lease
        if move is None or not is_known or end.parcel.number not in move.on_way:
            self.counter.num_late += 1
            return
        sent = move.take(end)
        cells = end.parcel.source.cell, end.parcel.target.cell
        if end.is_sound:
            self._links.arrived(*cells, end.seconds, sent.num_on_way)
            self.counter.parcel(len(sent.places))
            return
        self.counter.num_failed += 1
        is_lost = not (move.source.is_there and move.target.is_there)
        if not is_lost:
            self._links.failed(*cells)
        self.end(move, "lost" if is_lost else "failed")

    def land(self, cell: CellLike) -> bool:
        """Lets the sequences run in a cell whose pages have all arrived there."""
        landing = [m for m in self if m.target.cell is cell and m.is_complete]
        for move in landing:
            if not move.target.is_there:
                self.end(move, "lost")
                continue
            assert move.kept is not None
            source, target = move.source, move.target
            hidden = move.kept.hidden
            target.engine.moving.arrive(move.reservation, hidden)
            if source.is_there:
                source.engine.moving.drop(move.kept, is_verified=True)
            self.counter.arrived(move.num_steps, self._clock() - move.departed_at)
            self._forget(move, "done")
        return bool(landing)

    def end(self, move: CellMove, result: MoveResult, *, keeps_pages: bool = True) -> None:
        """Ends a move that does not succeed. A sequence between two engines goes on at the source
        if it can, else it is homeless."""
        self._carrier.end_lease(move.lease)
        if move.target.is_there:
            move.target.engine.moving.close(move.reservation, keeps_pages=keeps_pages)
        self._forget(move, result)
        moving, is_wanted = move.source.engine.moving, result != "aborted"
        if move.source.is_there:
            moving.retract(move.sequence)
        if move.kept is None:
            return
        if move.source.is_there:
            if is_wanted and moving.take_back(move.kept):
                return
            moving.drop(move.kept, is_verified=False)
        if is_wanted:
            self.homeless.append(move)

    @property
    def has_landing(self) -> bool:
        """True if a sequence's pages have all arrived at a cell that is not out."""
        return any(m.is_complete and not m.target.cell.is_out for m in self._moves.values())

    @property
    def late_s(self) -> float:
        """The time at which `end_late` ends the next move, unless something happens before."""
        since = [each for move in self if (each := move.waits_since()) is not None]
        return min(since, default=math.inf) + self._timeout_s

    def end_late(self) -> None:
        """Ends the moves that have waited for too long."""
        oldest = self._clock() - self._timeout_s
        for move in self:
            since = move.waits_since()
            if since is not None and since <= oldest:
                if move.on_way:
                    self._links.failed(move.source.at.cell, move.target.at.cell, is_late=True)
                self.end(move, "timed_out")

    def end_lost(self) -> None:
        """Ends the moves from and to ranks that are gone. A sequence whose pages have all arrived
        does not need its source any more."""
        for move in self:
            if move.target.is_there and (move.is_complete or move.source.is_there):
                continue
            places = [move.target] if move.is_complete else [move.source, move.target]
            lost = [place for place in places if not place.is_there]
            for place in lost:
                self._carrier.rank_lost(place.at)
            if lost:
                self.end(move, "lost")

    def step_ended(self, cell: CellLike, *, has_tokens: bool) -> None:
        """Notes that a cell has ended a step, which may have ended requests. `has_tokens` says
        whether it gave tokens.
        """
        for move in self:
            move.num_steps += has_tokens and move.has_departed and move.target.cell is cell
            if move.source.cell is cell and not move.has_departed:
                self._end_with_request(move)

    def _end_with_request(self, move: CellMove) -> bool:
        """Ends a move whose request has ended at the source."""
        has_ended = move.source.is_there and not move.source.engine.moving.has(move.sequence)
        if has_ended:
            self.end(move, "ended", keeps_pages=move.sequence.is_proven)
        return has_ended

    def _has_room(self, move: CellMove) -> bool:
        target = move.target
        is_idle = not target.cell.is_out and not target.engine.step_sequences
        return target.engine.moving.extend(move.reservation, may_wait=is_idle)

    def _is_near(self, move: CellMove, step_s: float) -> bool:
        """Returns whether the rest travels in less time than one more step at the source takes, or
        cannot become less."""
        num_unsent = move.num_unsent()
        has_room = num_unsent <= self._carrier.num_free(move.target.at)
        if not (has_room and move.target.cell.is_live):
            return False
        num_left = move.num_on_way + num_unsent
        if num_left <= _FEW_PAGES:
            return (
                True  # on a slow link, a page may become full before the previous one has arrived
            )
        cells = move.source.at.cell, move.target.at.cell
        return self._links.pages_s(*cells, num_left) <= step_s

    def _depart(self, move: CellMove) -> None:
        now = self._clock()
        move.kept = move.source.engine.moving.depart(move.sequence)
        move.departed_at = now
        if not move.sequence.is_sound:  # a last check found a NaN in its pages
            self.end(move, "stayed", keeps_pages=False)
            return
        move.send(self._carrier, now)
        assert move.next_place * move.sequence.page_size >= move.sequence.num_computed_tokens

    def _forget(self, move: CellMove, result: MoveResult) -> None:
        del self._moves[move.sequence.id]
        self.counter.ended(move.kind, result)
        self._next_at.pop(move.sequence.id, None)
        pause_s = _FAILED_PAUSE_S if result == "failed" else _PAUSE_S
        self._next_at[move.sequence.id] = self._clock() + pause_s
        if len(self._next_at) > _MOST_REMEMBERED:
            del self._next_at[next(iter(self._next_at))]

    def check_integrity(self) -> None:
        """Asserts that a sequence has one owner, and that each reservation belongs to a move."""
        for move in self._moves.values():
            engines = [p.engine for p in (move.source, move.target) if p.is_there]
            owners = [engine for engine in engines if engine.moving.has(move.sequence)]
            assert len(owners) <= (not move.has_departed), f"{move.sequence.id} has two owners"
