"""Simulates a queue with deadlines of whole answers, by how well their lengths are known.

The lengths are those of the sampled answers, in the order in which they were predicted. A request's
latest start is its deadline less the predicted time of its answer, so better predictions find out
earlier which request is short of time. The oracle knows every length.

The server's own estimate, the recent answers of a tier, cannot be compared: it never exceeds
max_tokens, which is the length of the answer in a simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from deadlines.setting import BUDGET, PRIORITIES, SEATS, SHARES, WEIGHTS, model
from lengths.stream import Streamed
from moe_serve.bench.capacity import at_load, find_capacity
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.simulated_run import SimulatedRun
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.bench.workload.trace_rows import Trace, TraceRow
from moe_serve.bench.workload.workload import Workload
from moe_serve.config.sections import OrderName, SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import CellSettings, make_cells
from moe_serve.simulate.world import World

_WARM_UP, _COUNT, _LOAD = 500, 2000, 1.2
TARGETS = {"interactive": 2.0, "standard": 6.0, "flex": 30.0}  # times a usual answer at full batch


class KnownLengths:
    """Implements AnswerLengths by a number for each request."""

    def __init__(self, lengths: Mapping[str, float]) -> None:
        self._lengths = lengths

    def p90(self, sequence: EngineSequence, tier: int) -> float:
        return self._lengths[sequence.request.request_id]

    def note(self, sequence: EngineSequence, tier: int, *, is_complete: bool) -> None:
        """Does nothing, as all lengths are known."""


def queue_gain(found: Sequence[Streamed]) -> Iterator[tuple[str, str, str, str]]:
    """Yields (order, what is known, weighted tardiness, share of the gap that it closes)."""
    part = found[_WARM_UP : _WARM_UP + _COUNT]
    usual = float(np.quantile([each.length for each in found[:_WARM_UP]], 0.9))
    known = {
        "P90 of all answers": _known([usual] * len(part)),
        "max_tokens": _known([float(each.max_tokens) for each in part]),
        "mean of the domain": _known([each.domain_mean for each in part]),
        "predicted P90": _known([each.p90 for each in part]),
        "predicted P50": _known([each.p50 for each in part]),
        "oracle": _known([float(each.length) for each in part]),
    }
    run = _run(part)
    capacity = find_capacity(run)
    orders: tuple[OrderName, ...] = ("edf", "atc")
    for order in orders:
        late = {name: _tardiness(run, capacity, order, lengths) for name, lengths in known.items()}
        base, best = late["P90 of all answers"], late["oracle"]
        for name, value in late.items():
            share = f"{(base - value) / (base - best):.0%}" if base > best else "no gap"
            yield order, name, f"{value:.3f}", share


def _known(values: Sequence[float]) -> KnownLengths:
    return KnownLengths({str(index): value for index, value in enumerate(values)})


def _run(part: Sequence[Streamed]) -> SimulatedRun:
    rows = tuple(
        TraceRow(at_s=0.1 * index, prompt_tokens=each.num_prompt, output_tokens=each.length)
        for index, each in enumerate(part)
    )
    settings = CellSettings(
        layout=Layout.parse("colocated", 1),
        scheduler=SchedulerConfig(
            max_num_seqs=SEATS, max_batched_tokens=BUDGET, max_queued_requests=2**20
        ),
        page_size=128,
        max_model_len=max(row.prompt_tokens + row.output_tokens for row in rows),
    )
    return SimulatedRun(
        model=model(), settings=settings, workload=Workload(seed=0, trace=Trace(rows=rows))
    )


def _tiers(usual_s: float) -> TierMix:
    tiers = [
        TierConfig(name=name, weight=WEIGHTS[name], e2e_s=times * usual_s)
        for name, times in TARGETS.items()
    ]
    return TierMix.of(tiers, SHARES, dict.fromkeys(PRIORITIES, 0))


def _tardiness(
    run: SimulatedRun, capacity: float, order: OrderName, lengths: KnownLengths
) -> float:
    """Returns the weighted tardiness, in seconds. An answer usually takes `SEATS / capacity`."""
    mix = _tiers(SEATS / capacity)
    loaded = at_load(run, _LOAD, capacity)
    scheduler = replace(
        run.settings.scheduler,
        tiers=mix.tiers,
        order=order,
        patience_s=8.0 * SEATS / capacity,
        max_wait_s=45.0 * SEATS / capacity,
    )
    workload = replace(loaded.workload, tiers=mix)
    (cell,) = make_cells(run.model, replace(run.settings, scheduler=scheduler))
    assert isinstance(cell.engine, Engine) and cell.engine.service is not None, "it has tiers"
    cell.engine.service.state.lengths = lengths
    times = World([cell]).run(jobs_of(list(workload.slots()), 0, mix))
    records = [record_of(each) for each in times]
    return ServiceFigures.of(records, mix.tiers, cell.clock.now).weighted_tardiness_s
