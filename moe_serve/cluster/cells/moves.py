"""Moves requests between cells: after their prompts, off draining cells, and to cells with room.

All of it happens on the engine's thread, between the steps of the cells concerned. Nothing here
waits, and time comes from the given clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_serve.clock import Clock
from moe_serve.cluster.cells.migration import Migration
from moe_serve.cluster.cells.open_moves import OpenMoves
from moe_serve.cluster.cells.places import CellLike, Place, places_of
from moe_serve.cluster.cells.rates import LinkRates, StepRates
from moe_serve.cluster.cells.router import CellRouter
from moe_serve.cluster.parcels.parcel import PageCarrier
from moe_serve.config.cells import CellsConfig
from moe_serve.engine.execute.step_executor import ExecutorLostError
from moe_serve.engine.request.moves_stats import MovesStats
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.engine.service.step_model import FittedSteps, StepModel

_MOST_REFUSALS = 4  # of one rank's sequences in a turn, before the others are not tried
_PAUSE_S = 0.02  # before a rank asks for room again


class CellMoves:
    """Gives requests to cells and moves them; see the module's docstring."""

    def __init__(
        self,
        cells: Sequence[CellLike],
        carrier: PageCarrier,
        config: CellsConfig,
        clock: Clock,
        *,
        timeout_s: float,
        chunk_tokens: int,
        make_model: Callable[[], StepModel] = FittedSteps,
        policy: ServicePolicy | None = None,
    ) -> None:
        """`timeout_s` is the longest time that pages may travel, and `chunk_tokens` the most tokens
        of a step. `make_model` makes the model that predicts the steps of a cell. `policy` is that
        of the service tiers of all cells.
        """
        self._policy = policy
        self._cells, self._carrier, self._config, self._clock = [*cells], carrier, config, clock
        self._steps = StepRates(self._cells, clock, chunk_tokens, make_model)
        self._links = links = LinkRates(clock)
        self._router = CellRouter(self._cells, carrier, config, self._steps, links)
        self._open = OpenMoves(carrier, clock, links, timeout_s)
        self._migration = Migration(self._open, self._router, self._steps, clock)
        self._homeless: list[EngineSequence] = []
        self._wishes: dict[int, tuple[EngineSequence, Place]] = {}  # to be handed over, by id
        self._refused_at: dict[tuple[int, str], float] = {}  # by the rank that asked for room

    @property
    def has_work(self) -> bool:
        """True while some sequences belong to no engine."""
        return bool(self._homeless or self._open.homeless or self._open.between)

    @property
    def waiting(self) -> Sequence[EngineSequence]:
        """The sequences that belong to no engine."""
        moving = (*self._open.homeless, *self._open.between)
        return [*self._homeless, *(move.sequence for move in moving)]

    def add(self, sequence: EngineSequence) -> None:
        """Gives a sequence without an engine to a cell. While no cell is live, the sequence is kept
        here.
        """
        self._homeless.append(sequence)
        self._place_homeless()

    def abort(self, request_id: str) -> list[TokenDelta] | None:
        """Ends a request that belongs to no engine and returns its last delta. Returns None if an
        engine has it; then only its move ends.
        """
        for move in self._open:
            if move.sequence.request.request_id == request_id:
                self._wishes.pop(move.sequence.id, None)
                self._open.end(move, "aborted")
                if move.has_departed:
                    return self._aborted(move.sequence)
                return None
        self._take_homeless()
        for each in self._homeless:
            if each.request.request_id == request_id:
                self._homeless.remove(each)
                return self._aborted(each)
        return None

    def add_cell(self, cell: CellLike) -> None:
        """Lets requests go to a new cell from now on."""
        self._cells.append(cell)

    def concerns(self, cell: CellLike) -> bool:
        """Returns whether a move leaves a cell or goes there."""
        return any(cell in (move.source.cell, move.target.cell) for move in self._open)

    def remove_cell(self, cell: CellLike) -> None:
        """Forgets a cell that has no requests and that no move concerns."""
        assert not self.concerns(cell), f"a move concerns cell {cell.index}, which leaves"
        self._cells.remove(cell)
        self._wishes = {k: wish for k, wish in self._wishes.items() if wish[1].cell is not cell}
        for at in [at for at in self.draining_ranks if at[0] == cell.index]:
            self._router.draining.discard(at)
        self._steps.forget(cell)
        self._links.forget(cell.index)

    def before_step(self, cell: CellLike) -> None:
        """Advances the moves to and from a cell that is not out: takes in sequences that have
        arrived, sends pages, and gives up sequences that leave.
        """
        self._steps.begins(cell)
        self._place_homeless()
        self._open.end_lost()
        if not cell.is_live:
            return
        self._open.land(cell)
        for place in places_of([cell]):
            is_open = place.order not in self._router.draining
            place.engine.moving.set_open(is_open=is_open)
            try:
                self._before_step(place)
            except ExecutorLostError:
                continue  # the cell notices when it settles, and calls `rank_lost`
        self._place_homeless()

    def after_step(self, cell: CellLike) -> None:
        """Notes that a cell has ended a step and published it."""
        has_tokens = self._steps.ended(cell)
        self._open.step_ended(cell, has_tokens=has_tokens)
        self._follow_wishes(cell)

    def turn(self) -> bool:
        """Takes the parcels that have ended, and ends moves that are late. Returns True if
        `before_step` has something to do for a cell that is not out."""
        for end in self._carrier.take_ended():
            self._open.take(end)
        self._open.end_late()
        self._open.end_lost()
        has_placed = self._place_homeless()
        return has_placed or self._open.has_landing

    @property
    def due_s(self) -> float:
        """The time at which `turn` should be called although nothing happens before: now if a
        sequence has no cell or can run in one that is not out, else when the next move is late."""
        if self._homeless or self._open.homeless or self._open.has_landing:
            return self._clock()
        return self._open.late_s

    def rank_lost(self, cell: CellLike, rank: str, sequences: Sequence[EngineSequence]) -> None:
        """Ends the moves from and to a rank that is gone, and gives its sequences, which have left
        their engine, to other ones."""
        self._open.end_lost()
        self._wishes = {key: wish for key, wish in self._wishes.items() if wish[1].is_there}
        self._homeless += sequences
        self._place_homeless()

    def drain_rank(self, cell: CellLike, rank: str, *, is_draining: bool) -> None:
        """Stops or resumes giving requests to one rank; its running ones move away. Safe from any
        thread.
        """
        change = self._router.draining.add if is_draining else self._router.draining.discard
        change((cell.index, rank))

    @property
    def draining_ranks(self) -> list[tuple[int, str]]:
        """The ranks that drain although their cell does not: the number of the cell, and the name.
        Safe from any thread.
        """
        return list(self._router.draining)

    def stats(self) -> MovesStats:
        """Returns a snapshot. Safe from any thread."""
        num_between = len(self._open.between) + len(self._open.homeless) + len(self._homeless)
        return self._open.counter.snapshot(len(self._open), num_between)

    def check_integrity(self) -> None:
        """Asserts that each sequence has exactly one owner."""
        self._open.check_integrity()
        engines = [place.engine for place in places_of(self._cells)]
        for sequence in self.waiting:
            owners = [e for e in engines if e.moving.has(sequence)]
            assert not owners, f"sequence {sequence.id} has an engine and is between two"

    def _before_step(self, place: Place) -> None:
        if self._router.is_draining(place):
            self._drain(place)
        else:
            self._hand_over(place)
            if self._config.migrate:
                self._migration.relieve(place)
        step_s = self._steps.usual_s(place.cell)
        for move in self._open:
            if move.source.is_same(place) and not move.has_departed:
                self._open.advance(move, step_s)

    def _hand_over(self, place: Place) -> None:
        """Opens leases for the sequences that read their prompts here for another cell."""
        num_refused, now = 0, self._clock()
        if now < self._refused_at.get(place.order, -_PAUSE_S) + _PAUSE_S:
            return
        for sequence, home in list(self._wishes.values()):
            if home.is_same(place) and self._should_begin(sequence, place):
                targets = self._router.targets(sequence, place, is_hand_over=True)
                if any(self._open.begin(sequence, "hand_over", place, t) for t in targets):
                    place.engine.moving.announce(sequence)
                    continue
                num_refused += 1
                self._refused_at[place.order] = now
                if num_refused == _MOST_REFUSALS:
                    break

    def _follow_wishes(self, cell: CellLike) -> None:
        """Forgets the wishes of sequences that are elsewhere or have ended. One that waits at
        another rank of its cell now keeps its wish."""
        for key, (sequence, home) in list(self._wishes.items()):
            if home.cell is not cell or home.engine.moving.has(sequence):
                continue
            if self._open.of(sequence) is None:
                del self._wishes[key]
            for place in places_of([cell]):
                if place.engine.moving.has(sequence):
                    self._wishes[key] = sequence, place

    def _should_begin(self, sequence: EngineSequence, place: Place) -> bool:
        """Returns whether a sequence should be handed over now. One that waits, or that ends with
        its next token, should not."""
        if not (sequence.is_running and place.engine.moving.has(sequence)):
            return False
        is_short = place.engine.stop_rule.num_left(sequence) <= 1
        return not is_short and self._open.may_begin(sequence)

    def _drain(self, place: Place) -> None:
        """Lets waiting sequences wait elsewhere, and begins to move running ones."""
        if all(self._router.is_draining(other) for other in self._router.open_places):
            return  # no other cell has room
        for sequence in place.engine.moving.waiting:
            place.engine.moving.release(sequence)
            self._wishes.pop(sequence.id, None)
            self._homeless.append(sequence)
        if self._config.migrate:
            self._migration.drain(place)

    def _place_homeless(self) -> bool:
        """Gives sequences without an engine to cells; returns True if some got one."""
        self._take_homeless()
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            route = self._router.route(sequence)
            if route is None:
                self._homeless.append(sequence)
                continue
            moving = route.reader.engine.moving
            if sequence.num_output_tokens > 0:
                num_lost = sequence.num_tokens - 1 - moving.num_cached_tokens(sequence)
                self._open.counter.num_recomputed += num_lost
            route.reader.engine.adopt(sequence)
            is_reader = route.reader.cell.shape.role == "prefill"
            if route.is_hand_over or (is_reader and self._config.hand_over != "off"):
                self._wishes[sequence.id] = sequence, route.reader
        return len(self._homeless) < len(homeless)

    def _take_homeless(self) -> None:
        """Takes the sequences of failed moves, which have lost their pages."""
        moves, self._open.homeless = self._open.homeless, []
        for move in moves:
            move.sequence.leave_engine()
            self._homeless.append(move.sequence)

    def _aborted(self, sequence: EngineSequence) -> list[TokenDelta]:
        if self._policy is not None:
            self._policy.leave(sequence)
        return [
            TokenDelta(
                request_id=sequence.request.request_id,
                finish_reason=FinishReason.ABORT,
                num_preemptions=sequence.num_preemptions,
            )
        ]
