"""Lets cells under one coordinator serve requests: events are arrivals, steps and parcels.

The loop decides nothing that a server decides. `Moves` routes requests to cells and hands them
over, `Autoscaler` says how many cells there should be, and the engines schedule. The loop tells
them what happened when, in the order in which the server's own loop does:

    arrival:          Admission.check, if there are service tiers; Moves.add
    end of a step:    engine.end, Moves.after_step
    parcels arrive:   Moves.turn
    then each cell without a step, if it has work:    Moves.before_step, engine.begin
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.engine.request.request import TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.service.admission import Admission
from moe_serve.simulate.coordinated.coordinated_cell import CoordinatedCell
from moe_serve.simulate.coordinated.instant_carrier import InstantCarrier
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.sessions import Sessions
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest, StepsDone, request_of
from moe_serve.simulate.virtual_clock import VirtualClock
from moe_serve.simulate.world import is_refused, without_collections


class Watcher(Protocol):
    """Sees what happens in a world, and acts at times of its own."""

    @property
    def next_s(self) -> float | None:
        """Returns the time at which it acts next; None if it never does."""
        ...

    def advance_to(self, now: float) -> None:
        """Acts, if it is time to."""
        ...

    def request_came(self) -> None: ...

    def request_refused(self, times: RequestTimes) -> None: ...

    def first_token_came(self, times: RequestTimes) -> None: ...

    def request_ended(self, times: RequestTimes) -> None: ...

    def step_ended(self, cell: CoordinatedCell, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class CellChange:
    """A request whose next token came from another cell. `exposed_s`: from its last token in the
    one until the step began that computed the next in the other."""

    request_id: str
    source: int
    target: int
    exposed_s: float


@dataclass(slots=True)
class _Live:
    """A request in progress, and the cell that computed its last token, at `last_s`."""

    times: RequestTimes
    cell: int | None = None
    last_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Entered:
    """A request that the server's HTTP side has accepted."""

    prompt: tuple[int, ...]
    times: RequestTimes


class CellsWorld:
    """The cells of a coordinator, and the requests that they serve."""

    def __init__(
        self,
        cells: Sequence[CoordinatedCell],
        moves: CellMoves,
        carrier: InstantCarrier,
        clock: VirtualClock,
        ids: itertools.count[int],
        *,
        admission: Admission | None = None,
        watcher: Watcher | None = None,
        timeline: SimulatedTimeline | None = None,
        front: FrontEnd | None = None,
    ) -> None:
        """`ids`: the sequence numbers of the cells. `admission`: for the service tiers of all
        cells. `watcher`: may start and drain cells. `front`: the server's HTTP side; None: clients
        use the engines."""
        self.peak_in_flight = 0
        self.moved: list[CellChange] = []
        self._cells, self._moves, self._carrier = cells, moves, carrier
        self._clock, self._ids = clock, ids
        self._admission, self._watcher, self._timeline = admission, watcher, timeline
        self._front = front
        self._arrivals: list[tuple[float, int, SimulatedRequest, _Entered | None]] = []
        self._order = itertools.count()
        self._live: dict[str, _Live] = {}
        self._begun_s = [0.0] * len(cells)
        self._done: list[RequestTimes] = []
        self._jobs: Iterator[SimulatedRequest] = iter(())
        self._is_closed = False
        self._sessions = Sessions()
        self._has_news = True  # a cell may begin a step although nothing happens

    def run(
        self, jobs: Iterator[SimulatedRequest], concurrency: int | None = None
    ) -> list[RequestTimes]:
        """Serves all jobs, in the order of their ends. See `World.run`."""
        self._jobs, self._is_closed = jobs, concurrency is not None
        for _ in range(concurrency or 1):
            self._send_next(0.0)
        with without_collections():
            while (next_s := self._next_time()) is not None:
                self._clock.advance_to(next_s)
                self._handle_due()
                self._go_on()
        assert not self._live, f"{len(self._live)} requests never ended"
        return self._done

    def _next_time(self) -> float | None:
        times = [self._arrivals[0][0]] if self._arrivals else []
        ends = [cell.ranks.step_end for cell in self._cells if cell.is_out]
        times += [end for end in ends if end is not None]
        if not self._has_news:
            self._pass_parcels(min(times, default=math.inf))
        if (parcel_s := self._carrier.next_s) is not None:
            times.append(parcel_s)
        if self._watcher is not None and (self._live or times):
            act_s = self._watcher.next_s
            times += [] if act_s is None else [act_s]
        if self._carrier.has_ended:
            return self._clock.now
        return min(times, default=None)

    def _pass_parcels(self, until_s: float) -> None:
        """Lets parcels travel until one has ended, as long as nothing else happens. No cell can
        begin a step before that."""
        until_s = min(until_s, self._moves.due_s)
        while not self._carrier.has_ended:
            next_s = self._carrier.next_s
            if next_s is None or next_s >= until_s:
                return
            self._clock.advance_to(next_s)
            self._carrier.advance_to(next_s)

    def _handle_due(self) -> None:
        now = self._clock.now
        self._take_arrivals()
        for cell in [cell for cell in self._cells if cell.is_out]:
            end_s = cell.ranks.step_end
            assert end_s is not None, "a step was sent out"
            if end_s <= now:
                self._end(cell)
        self._take_arrivals()  # of a closed loop, after an end
        if self._watcher is not None:
            self._watcher.advance_to(now)
        self._carrier.advance_to(now)

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._clock.now:
            _, _, job, entry = heapq.heappop(self._arrivals)
            if entry is None:
                self._due(job)
            else:
                self._enter(job, entry)

    def _go_on(self) -> None:
        """Begins steps of cells that have something to do, until none has. Without news, a cell
        without work has nothing to do."""
        has_news = True
        while has_news:
            has_news = self._moves.turn()
            idle = [c for c in self._cells if not c.is_out and (has_news or c.engine.has_work)]
            has_news = sum([self._begin(cell) for cell in idle]) > 0
        stuck = (not c.is_out and c.engine.has_work for c in self._cells)
        self._has_news = self._watcher is not None or any(stuck)

    def _begin(self, cell: CoordinatedCell) -> bool:
        """Begins a cell's next step; returns False if there is nothing to compute."""
        self._moves.before_step(cell)
        if not cell.engine.has_work:
            return False
        if not cell.engine.begin():
            deltas = cell.engine.end()
            self._publish(cell, StepsDone(self._clock.now, (self._clock.now,), deltas))
            return bool(deltas)
        cell.is_out, self._begun_s[cell.index] = True, self._clock.now
        return True

    def _end(self, cell: CoordinatedCell) -> None:
        now, begun_s = self._clock.now, self._begun_s[cell.index]
        cell.engine.wait()
        deltas = cell.engine.end()
        cell.is_out = False
        if self._watcher is not None:
            self._watcher.step_ended(cell, now - begun_s)
        self._publish(cell, StepsDone(begun_s, (now,), deltas))
        self._moves.after_step(cell)

    def _publish(self, cell: CoordinatedCell, done: StepsDone) -> None:
        """Notes the tokens of a step that has ended."""
        if self._timeline is not None and done.ends[-1] > done.begin_s:
            self._timeline.append_steps(cell.index, done, cell.engine.num_running)
        for place, delta in enumerate(done.deltas):
            live = self._live[delta.request_id]
            if delta.token_ids:
                self._got(cell, live, delta, done, place)
            if delta.finish_reason is not None:
                live.times.error = delta.error
                self._finish(live.times)

    def _got(
        self, cell: CoordinatedCell, live: _Live, delta: TokenDelta, done: StepsDone, place: int
    ) -> None:
        times = live.times
        if not times.token_times:
            times.num_cached, times.cell = delta.num_cached_tokens, cell.index
            if self._watcher is not None:
                self._watcher.first_token_came(times)
        elif live.cell is not None and live.cell != cell.index:
            exposed_s = done.begin_s - live.last_s
            self.moved.append(CellChange(delta.request_id, live.cell, cell.index, exposed_s))
        live.cell, live.last_s = cell.index, done.ends[-1]
        ends = [live.last_s] * len(delta.token_ids)
        if self._front is not None:
            ends = self._front.pass_tokens(ends, place, times.end_s)
        times.token_times.extend(ends)

    def _finish(self, times: RequestTimes) -> None:
        del self._live[str(times.index)]
        self._done.append(times)
        if self._watcher is not None:
            self._watcher.request_ended(times)
        if self._is_closed:
            self._send_next(max(self._clock.now, times.end_s))
        elif times.session and (job := self._sessions.turn_after(times.session)) is not None:
            self._arrive(job)

    def _due(self, job: SimulatedRequest) -> None:
        """Lets a job arrive, unless it is a turn of a session that waits for an earlier one."""
        if self._is_closed or self._sessions.may_come(job):
            self._arrive(job)
        if not self._is_closed:
            self._send_next(self._clock.now)

    def _arrive(self, job: SimulatedRequest) -> None:
        now, prompt = self._clock.now, tuple(job.make_prompt())
        times = RequestTimes(
            index=job.index,
            cell=-1,
            due_s=now,
            num_prompt=len(prompt),
            num_output=job.num_output,
            service=job.service,
            session=job.session,
        )
        entry = _Entered(prompt, times)
        if self._front is None:
            self._enter(job, entry)
        else:
            at_s = self._front.pass_request(now, len(prompt))
            heapq.heappush(self._arrivals, (at_s, next(self._order), job, entry))

    def _enter(self, job: SimulatedRequest, entry: _Entered) -> None:
        """Gives a request to the cells."""
        times = entry.times
        if is_refused(self._admission, job, times):
            self._refuse(times)
            return
        self._live[str(job.index)] = _Live(times)
        self.peak_in_flight = max(self.peak_in_flight, len(self._live))
        if self._watcher is not None:
            self._watcher.request_came()
        request = request_of(job, entry.prompt, self._clock.now)
        self._moves.add(EngineSequence(next(self._ids), request))

    def _refuse(self, times: RequestTimes) -> None:
        self._done.append(times)
        if self._watcher is not None:
            self._watcher.request_refused(times)
        self._send_next(self._clock.now)

    def _send_next(self, now_s: float) -> None:
        job = next(self._jobs, None)
        if job is not None:
            at_s = now_s if self._is_closed else job.at_s
            heapq.heappush(self._arrivals, (at_s, next(self._order), job, None))
