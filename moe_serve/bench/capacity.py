"""Finds the capacity of a simulated cluster for a trace, and sets a trace's speed by it.

The capacity is the highest rate at which the queue of a server in order of arrival is stable. A
queue is stable below the rate at which the server works off a queue that never ends, so one run
finds it: all requests wait from the beginning, and the middle of the run is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.trace_rows import Trace
from moe_serve.bench.workload.workload import Workload
from moe_serve.errors import BenchError

_LEAST = 20  # requests, so that there is a middle
_FIRST, _LAST = 0.1, 0.9  # shares of the requests between whose ends a run is timed


def find_capacity(run: SimulatedRun) -> float:
    """Returns the requests per second of the run's trace. Raises BenchError."""
    trace = _trace_of(run.workload)
    together = replace(trace, rows=tuple(replace(row, at_s=0.0, session="") for row in trace.rows))
    settings = run.settings
    scheduler = replace(settings.scheduler, order="priority", tiers=(), max_passed_over_s=0.0)
    full = replace(
        run,
        workload=replace(run.workload, trace=together, tiers=None, duration_s=None),
        settings=replace(settings, scheduler=scheduler),
        cells=None if run.cells is None else run.cells.with_scheduler(scheduler),
        timeline=None,
        slo=None,
    )
    return steady_rate(run_simulation(full).records)


def at_load(run: SimulatedRun, load: float, capacity: float) -> SimulatedRun:
    """Returns the run with the times of its trace scaled, so that requests arrive at `load` times
    the capacity."""
    trace = _trace_of(run.workload)
    rate = len(trace.rows) / max(trace.rows[-1].at_s, 1e-9)
    factor = rate / (load * capacity)
    rows = tuple(replace(row, at_s=row.at_s * factor) for row in trace.rows)
    return replace(run, workload=replace(run.workload, trace=replace(trace, rows=rows)))


def _trace_of(workload: Workload) -> Trace:
    trace = workload.trace
    if trace is None or workload.trace_repeats:
        raise BenchError("a capacity is found for a trace and its times: give --trace FILE.")
    if len(trace.rows) < _LEAST:
        raise BenchError(
            f"a capacity needs a trace of {_LEAST} requests or more, got {len(trace.rows)}."
        )
    return trace


def steady_rate(records: Sequence[RequestRecord]) -> float:
    """Returns the requests per second that ended in the middle of a run."""
    ends = sorted(record.end_s for record in records)
    first, last = int(_FIRST * len(ends)), int(_LAST * len(ends)) - 1
    return (last - first) / (ends[last] - ends[first])
