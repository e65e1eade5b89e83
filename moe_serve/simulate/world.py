"""Lets simulated cells serve requests: an event loop over arrivals and the ends of steps.

The loop decides nothing that a server decides. It gives a request to an engine when it arrives,
asks an idle engine for its next step, and notes when tokens come out. Cells share nothing: a
balancer chooses the cell of a request.

Decode steps that differ in nothing but their contexts are run several at once (`StepsAhead`), with
the same schedules and times as one by one.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_serve.engine.service.admission import Admission
from moe_serve.simulate.balancer import Balancer, FewestRequests
from moe_serve.simulate.sessions import Sessions
from moe_serve.simulate.simulated_cell import SimulatedCell
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.steps_ahead import (
    RequestTimes,
    SimulatedRequest,
    StepsAhead,
    StepsDone,
    num_alike,
    request_of,
)

_ARRIVAL, _ENTRY, _END, _START = 0, 1, 2, 3  # the order of events at one moment
_MOST_AHEAD = 32  # steps that are predicted at once: a request that comes makes the rest useless


@dataclass(frozen=True, slots=True)
class _Entry:
    """A request that its server's HTTP side has accepted."""

    job: SimulatedRequest
    prompt: tuple[int, ...]
    times: RequestTimes


class World:
    """The cells, and the requests that they serve."""

    def __init__(
        self,
        cells: Sequence[SimulatedCell],
        balancer: Balancer | None = None,
        *,
        jumps: bool = True,
        timeline: SimulatedTimeline | None = None,
    ) -> None:
        """`balancer` None: requests go to the cell with the fewest in progress. `jumps`: run equal
        steps at once. `timeline`: gets all steps."""
        self.peak_in_flight = 0
        self._timeline = timeline
        self.num_repeated = 0  # steps that were run together with the one before
        self._cells, self._balancer, self._jumps = cells, balancer or FewestRequests(), jumps
        self._events: list[tuple[float, int, int, int, object]] = []
        self._order = itertools.count()
        self._num_in_cell = [0] * len(cells)
        self._is_busy = [False] * len(cells)
        self._running: list[dict[str, RequestTimes]] = [{} for _ in cells]
        self._is_steady = [False] * len(cells)  # the last step gave a token to all requests
        self._ahead: list[StepsAhead | None] = [None] * len(cells)
        self._num_running = 0
        self._done: list[RequestTimes] = []
        self._jobs: Iterator[SimulatedRequest] = iter(())
        self._is_closed = False
        self._sessions = Sessions()

    def run(
        self, jobs: Iterator[SimulatedRequest], concurrency: int | None = None
    ) -> list[RequestTimes]:
        """Serves all jobs, in the order of their ends. `concurrency`: a closed loop, in which that
        many jobs are in progress; None: an open loop, in which jobs arrive at their times."""
        self._jobs, self._is_closed = jobs, concurrency is not None
        for _ in range(concurrency or 1):
            self._send_next(0.0)
        with without_collections():
            self._handle_events()
        return self._done

    def _handle_events(self) -> None:
        while self._events:
            at_s, kind, cell, _, what = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                assert isinstance(what, SimulatedRequest), "an arrival has a job"
                self._due(at_s, what)
            elif kind == _ENTRY:
                assert isinstance(what, _Entry), "an entry has a request"
                self._enter(at_s, what)
            elif kind == _START:
                self._start(at_s, cell)
            elif isinstance(what, StepsAhead):
                if what is self._ahead[cell]:  # else a request came in between
                    self._end(cell, self._run_ahead(cell, what, len(what.ends)))
            else:
                assert isinstance(what, StepsDone), "an end has steps"
                self._end(cell, what)

    def _push(self, at_s: float, kind: int, cell: int, what: object = None) -> None:
        heapq.heappush(self._events, (at_s, kind, cell, next(self._order), what))

    def _send_next(self, now_s: float) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._push(now_s if self._is_closed else job.at_s, _ARRIVAL, -1, job)

    def _due(self, at_s: float, job: SimulatedRequest) -> None:
        """Lets a job arrive, unless it is a turn of a session that waits for an earlier one."""
        if self._is_closed or self._sessions.may_come(job):
            self._arrive(at_s, job)
        if not self._is_closed:
            self._send_next(at_s)

    def _arrive(self, at_s: float, job: SimulatedRequest) -> None:
        prompt = tuple(job.make_prompt())
        index = self._balancer.cell_of(len(prompt), self._num_in_cell)
        times = RequestTimes(
            index=job.index,
            cell=index,
            due_s=at_s,
            num_prompt=len(prompt),
            num_output=job.num_output,
            service=job.service,
            session=job.session,
        )
        self._num_in_cell[index] += 1
        entry, front = _Entry(job, prompt, times), self._cells[index].front
        if front is None:
            self._enter(at_s, entry)
        else:
            self._push(front.pass_request(at_s, len(prompt)), _ENTRY, index, entry)

    def _enter(self, at_s: float, entry: _Entry) -> None:
        """Gives a request to the engine of its cell."""
        job, times = entry.job, entry.times
        index, cell = times.cell, self._cells[times.cell]
        self._cut_ahead(at_s, index)
        if self._is_refused(job, times):
            self._done.append(times)
            self._num_in_cell[index] -= 1
            self._ended(at_s, job.session)
            return
        request = request_of(job, entry.prompt, at_s)
        request_id = request.request_id
        cell.engine.add(request)
        if cell.front is not None and cell.executor is not None:
            cell.executor.delay(cell.front.begin_s)
        self._is_steady[index] = False
        self._running[index][request_id] = times
        self._num_running += 1
        self.peak_in_flight = max(self.peak_in_flight, self._num_running)
        if not self._is_busy[index]:
            self._is_busy[index] = True
            self._push(at_s, _START, index)

    def _ended(self, at_s: float, session: str) -> None:
        """Sends the job that comes after the end of another one."""
        if self._is_closed:
            self._send_next(at_s)
        elif session and (job := self._sessions.turn_after(session)) is not None:
            self._arrive(at_s, job)

    def _is_refused(self, job: SimulatedRequest, times: RequestTimes) -> bool:
        return is_refused(self._cells[times.cell].engine.admission, job, times)

    def _start(self, at_s: float, index: int) -> None:
        """Runs a cell's next step. Its tokens are known now, and come out when it ends."""
        cell = self._cells[index]
        cell.clock.advance_to(at_s)
        ahead = self._foreseen(index, cell)
        if ahead is not None:
            self._ahead[index] = ahead
            self._push(ahead.ends[-1], _END, index, ahead)
            return
        deltas = cell.engine.step()
        is_going_on = deltas or cell.clock.now > at_s or cell.engine.num_running
        assert is_going_on, f"cell {index} has {cell.engine.num_waiting} requests that never start"
        self._push(cell.clock.now, _END, index, StepsDone(at_s, (cell.clock.now,), deltas))

    def _foreseen(self, index: int, cell: SimulatedCell) -> StepsAhead | None:
        """Returns the next steps of a cell, if they are alike as long as no request comes. With
        service tiers none are: the engine measures every step for its forecasts."""
        is_possible = self._jumps and self._is_steady[index] and cell.executor is not None
        if not is_possible or cell.engine.num_waiting or cell.engine.admission is not None:
            return None
        running = self._running[index].values()
        num_steps = min(_MOST_AHEAD, num_alike(running, cell.page_size))
        if num_steps < 2 or cell.executor is None:
            return None
        num_tokens = sum([job.num_prompt + len(job.token_times) for job in running])
        ends = cell.executor.ends_of(num_tokens, len(running), num_steps)
        return StepsAhead(begins=(cell.clock.now, *ends[:-1]), ends=tuple(ends))

    def _cut_ahead(self, at_s: float, index: int) -> None:
        """Runs what a cell had begun when a request comes: only steps that began before it."""
        ahead = self._ahead[index]
        if ahead is None:
            return
        num_begun = max(1, bisect_left(ahead.begins, at_s))
        done = self._run_ahead(index, ahead, num_begun)
        self._push(done.ends[-1], _END, index, done)

    def _run_ahead(self, index: int, ahead: StepsAhead, num_steps: int) -> StepsDone:
        """Runs the first steps of those foreseen."""
        cell, self._ahead[index] = self._cells[index], None
        assert cell.executor is not None, "only steps of one device are run at once"
        ends = ahead.ends[:num_steps]
        cell.executor.repeat(ends)
        self.num_repeated += num_steps - 1
        return StepsDone(ahead.begins[0], ends, cell.engine.step())

    def _end(self, index: int, done: StepsDone) -> None:
        """Notes the tokens of steps, the last of which ends now."""
        at_s, running, front = done.ends[-1], self._running[index], self._cells[index].front
        if self._timeline is not None:
            self._timeline.append_steps(index, done, len(running))
        self._is_steady[index] = len(done.deltas) == len(running)
        for place, delta in enumerate(done.deltas):
            times = running[delta.request_id]
            ends: Sequence[float] = done.ends[: len(delta.token_ids)]
            if front is not None:
                ends = front.pass_tokens(ends, place, times.end_s)
            times.token_times.extend(ends)
            times.num_cached = delta.num_cached_tokens
            if delta.finish_reason is not None:
                times.error = delta.error
                del running[delta.request_id]
                self._done.append(times)
                self._num_in_cell[index] -= 1
                self._num_running -= 1
                self._ended(max(at_s, times.end_s), times.session)
        self._is_busy[index] = self._cells[index].engine.has_work
        if self._is_busy[index]:
            self._push(at_s, _START, index)


def is_refused(admission: Admission | None, job: SimulatedRequest, times: RequestTimes) -> bool:
    """Checks a request as the HTTP side of a server does, and notes the forecast and the refusal.
    `admission` None: all requests are accepted."""
    if admission is None:
        return False
    arguments = job.service, times.num_prompt, job.priority, times.due_s
    forecast, refusal = admission.forecast(*arguments), admission.check(*arguments)
    times.predicted_ttft_s = None if forecast is None else forecast.predicted_s
    times.is_refused = refusal is not None
    if refusal is not None:
        times.error = (
            f"its first token would come after {refusal.predicted_ttft_s:.3f} s, its target is "
            f"{refusal.target_ttft_s:g} s: retry after {refusal.retry_after_s:.3f} s"
        )
    return times.is_refused


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pauses the collector of cycles. A simulation makes no cycles, and looking for them takes a
    fifth of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
