"""Lets simulated cells serve requests: an event loop over arrivals and the ends of steps.

The loop decides nothing that a server decides. It gives a request to an engine when it arrives,
asks an idle engine for its next step, and notes when tokens come out. Cells share nothing: a
balancer chooses the cell of a request.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.simulate.balancer import Balancer, FewestRequests
from moe_serve.simulate.cell import Cell

_ARRIVAL, _END, _START = 0, 1, 2  # the order of events at one moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request of a workload. Its prompt is made when it arrives, as many would not fit memory."""

    index: int
    at_s: float  # unused in a closed loop
    num_output: int
    make_prompt: Callable[[], Sequence[int]]


def _no_times() -> array[float]:
    return array("d")


@dataclass(slots=True, kw_only=True)
class JobTimes:
    """The times of a job, in simulated seconds since the run began."""

    index: int
    cell: int
    due_s: float
    num_prompt: int
    num_output: int  # asked for
    num_cached: int = 0
    token_times: array[float] = field(default_factory=_no_times)  # one for each token
    error: str | None = None

    @property
    def end_s(self) -> float:
        return self.token_times[-1] if self.token_times else self.due_s


class World:
    """The cells, and the requests that they serve."""

    def __init__(self, cells: Sequence[Cell], balancer: Balancer | None = None) -> None:
        """`balancer` None: requests go to the cell with the fewest in progress."""
        self.peak_in_flight = 0
        self._cells, self._balancer = cells, balancer or FewestRequests()
        self._events: list[tuple[float, int, int, int, object]] = []
        self._order = itertools.count()
        self._num_in_cell = [0] * len(cells)
        self._is_busy = [False] * len(cells)
        self._running: dict[str, JobTimes] = {}
        self._done: list[JobTimes] = []
        self._jobs: Iterator[Job] = iter(())
        self._is_closed = False

    def run(self, jobs: Iterator[Job], concurrency: int | None = None) -> list[JobTimes]:
        """Serve all jobs, in the order of their ends. `concurrency`: a closed loop, in which that
        many jobs are in progress; None: an open loop, in which jobs arrive at their times."""
        self._jobs, self._is_closed = jobs, concurrency is not None
        for _ in range(concurrency or 1):
            self._send_next(0.0)
        with _without_collections():
            self._handle_events()
        return self._done

    def _handle_events(self) -> None:
        while self._events:
            at_s, kind, _, cell, what = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                assert isinstance(what, Job), "an arrival has a job"
                self._arrive(at_s, what)
            elif kind == _END:
                assert isinstance(what, list), "the end of a step has its deltas"
                self._end(at_s, cell, what)
            else:
                self._start(at_s, cell)

    def _push(self, at_s: float, kind: int, cell: int, what: object = None) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._order), cell, what))

    def _send_next(self, now_s: float) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._push(now_s if self._is_closed else job.at_s, _ARRIVAL, -1, job)

    def _arrive(self, at_s: float, job: Job) -> None:
        prompt = tuple(job.make_prompt())
        index = self._balancer.cell_of(len(prompt), self._num_in_cell)
        request_id = str(job.index)
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=job.num_output, temperature=0.0, ignore_eos=True, seed=job.index
            ),
            arrival_time=at_s,
        )
        self._cells[index].engine.add(request)
        self._num_in_cell[index] += 1
        self._running[request_id] = JobTimes(
            index=job.index,
            cell=index,
            due_s=at_s,
            num_prompt=len(prompt),
            num_output=job.num_output,
        )
        self.peak_in_flight = max(self.peak_in_flight, len(self._running))
        if not self._is_busy[index]:
            self._is_busy[index] = True
            self._push(at_s, _START, index)
        if not self._is_closed:
            self._send_next(at_s)

    def _start(self, at_s: float, index: int) -> None:
        """Run a cell's next step. Its tokens are known now, and come out when it ends."""
        cell = self._cells[index]
        cell.clock.advance_to(at_s)
        deltas = cell.engine.step()
        is_going_on = deltas or cell.clock.now > at_s or cell.engine.num_running
        assert is_going_on, f"cell {index} has {cell.engine.num_waiting} requests that never start"
        self._push(cell.clock.now, _END, index, deltas)

    def _end(self, at_s: float, index: int, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            times = self._running[delta.request_id]
            times.token_times.extend((at_s,) * len(delta.token_ids))
            times.num_cached = delta.num_cached_tokens
            if delta.finish_reason is not None:
                times.error = delta.error
                del self._running[delta.request_id]
                self._done.append(times)
                self._num_in_cell[index] -= 1
                if self._is_closed:
                    self._send_next(at_s)
        self._is_busy[index] = self._cells[index].engine.has_work
        if self._is_busy[index]:
            self._push(at_s, _START, index)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause the collector of cycles. A simulation makes none, and looking for them takes a fifth of
    its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
