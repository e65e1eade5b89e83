"""Computes the largest share of the top tier that a schedule could serve in time, beside its bar.

There are two figures for each workload: the share of the top tier alone on the same server, as if
the requests of all other tiers could be postponed without limit; and a bound for every schedule.
The bound treats the server as one machine that only reads prompts, at its fastest rate. All
requests of the tier have the same target, so deadlines are in order of arrival, and the largest set
that can be in time is found exactly (Kise, Ibaraki and Mine, Operations Research 26, 1978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deadlines.policies import ATC, FIFO
from deadlines.setting import BUDGET, Setting
from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.trace_rows import Trace, TraceRow
from moe_serve.bench.workload.workload import Workload

TOP = "interactive"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Shares of the top tier in time: alone in the simulator (the better of FIFO and ATC), and at
    most."""

    alone: float
    bound: float


def best_possible(setting: Setting, load: float) -> Oracle:
    """Finds both shares for a setting at a load."""
    mix = setting.tiers()
    alone = []
    for policy in (FIFO, ATC):
        run = setting.at(load, mix, policy.scheduler(setting), is_strict=False)
        own = _of_top(run)
        report = run_simulation(replace(run, workload=replace(run.workload, trace=own)))
        assert report.service is not None, "the run has tiers"
        alone.append(report.service.tiers[0].attained)
    token_s = _fastest_token_s(setting.run)
    num = most_in_time(
        [row.at_s for row in own.rows],
        [token_s * row.prompt_tokens for row in own.rows],
        setting.target_s,
    )
    return Oracle(alone=max(alone), bound=num / len(own.rows))


def most_in_time(released: Sequence[float], work: Sequence[float], target_s: float) -> int:
    """Returns the largest number of jobs that one machine can end within `target_s` of release.
    `released` grows. Jobs are taken in order; when one is late, the job without which the others
    end earliest is left out."""
    starts, taken = np.asarray(released, dtype=np.float64), np.asarray(work, dtype=np.float64)
    kept: list[int] = []
    block, end_s = 0, 0.0  # kept[block:] have run without a pause up to `end_s`
    for job in range(len(starts)):
        if starts[job] >= end_s:
            block, end_s = len(kept), float(starts[job])
        kept.append(job)
        end_s += float(taken[job])
        if end_s > starts[job] + target_s:
            ends = _ends_without_each(starts[kept[block:]], taken[kept[block:]])
            place = int(ends.argmin())
            del kept[block + place]
            block, end_s = _last_block(starts, taken, kept)
    return len(kept)


def _ends_without_each(starts: Floats, work: Floats) -> Floats:
    """Returns when jobs end in their order, without the first, without the second, and so on."""
    ends = np.full(len(starts), float(starts[0]))
    for job, (start, seconds) in enumerate(zip(starts, work, strict=True)):
        after = np.maximum(ends, start) + seconds
        after[job] = ends[job]
        ends = after
    return ends


def _last_block(starts: Floats, work: Floats, kept: list[int]) -> tuple[int, float]:
    """Returns the index at which the last run of jobs without a pause begins, and its end."""
    block, end_s = 0, 0.0
    for place, job in enumerate(kept):
        if starts[job] >= end_s:
            block, end_s = place, float(starts[job])
        end_s += float(work[job])
    return block, end_s


def _of_top(run: SimulatedRun) -> Trace:
    trace = run.workload.trace
    assert trace is not None, "a setting replays a trace"
    pairs = zip(trace.rows, run.workload.slots(), strict=True)
    return Trace(rows=tuple(replace(row, tier=TOP) for row, slot in pairs if slot.tier == TOP))


def _fastest_token_s(run: SimulatedRun) -> float:
    """Returns the seconds for each token of a full step that reads one prompt and nothing else."""
    row = TraceRow(at_s=0.0, prompt_tokens=BUDGET, output_tokens=2)
    workload, settings = Workload(seed=0, trace=Trace(rows=(row,))), run.settings
    alone = replace(run, workload=workload, settings=replace(settings, max_model_len=2 * BUDGET))
    summary = run_simulation(alone).summary
    assert summary.ttft_ms is not None, "it is answered"
    return summary.ttft_ms.p50 / 1e3 / BUDGET
