"""The capacity of a simulated server: the queue is stable below it, in order of arrival."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_serve.bench.capacity import at_load, find_capacity
from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.trace_rows import Trace, TraceRow
from moe_serve.bench.workload.workload import GammaArrivals, Workload
from moe_serve.config.sections import SchedulerConfig
from moe_serve.errors import BenchError
from moe_serve.pipeline.costs.step_costs import Ranks
from moe_serve.simulate.layout import Layout, ModelSize
from moe_serve.simulate.simulation import CellSettings, CostedModel
from tests.support.cluster.calibrations import cpu_calibration

SIZE = ModelSize(
    name="small", attention_bytes=1, expert_bytes=1, kv_token_bytes=1, num_kv_parts=1,
    num_experts=8, max_context=2048,
)  # fmt: skip


def simulated(num: int = 400) -> SimulatedRun:
    rng = np.random.default_rng(0)
    rows = tuple(
        TraceRow(
            at_s=float(at),
            prompt_tokens=int(rng.integers(20, 200)),
            output_tokens=int(rng.integers(2, 12)),
        )
        for at in range(num)
    )
    model = CostedModel(
        size=SIZE,
        costs=cpu_calibration().costs,
        ranks=Ranks(num_attention=1, num_experts=1),
        device_name="cpu",
        device_bytes=None,
    )
    scheduler = SchedulerConfig(max_num_seqs=4, max_batched_tokens=128)
    settings = CellSettings(
        layout=Layout.parse("colocated", 1), scheduler=scheduler, max_model_len=256
    )
    return SimulatedRun(
        model=model, settings=settings, workload=Workload(seed=0, trace=Trace(rows=rows))
    )


def waits(run: SimulatedRun) -> tuple[float, float]:
    """Simulates a load and returns the median TTFT of the second and of the last fifth of
    requests."""
    records = run_simulation(run).records
    ttfts = [record.ttft_s or 0.0 for record in records]
    fifth = len(ttfts) // 5
    return float(np.median(ttfts[fifth : 2 * fifth])), float(np.median(ttfts[-fifth:]))


def test_the_queue_grows_above_the_capacity_and_not_below() -> None:
    run = simulated()
    capacity = find_capacity(run)
    before, after = waits(at_load(run, 0.85, capacity))
    assert after < 3 * before
    before, after = waits(at_load(run, 1.25, capacity))
    assert after > 2.5 * before


def test_a_load_scales_the_times_of_the_trace() -> None:
    run = simulated(50)
    trace = at_load(run, 0.5, capacity=10.0).workload.trace
    assert trace is not None
    assert len(trace.rows) / trace.rows[-1].at_s == pytest.approx(5.0)


def test_only_the_times_of_a_trace_have_a_capacity() -> None:
    run = simulated(50)
    poisson = replace(run, workload=replace(run.workload, arrivals=GammaArrivals(rate=1.0)))
    with pytest.raises(BenchError, match="a capacity is found for a trace and its times"):
        find_capacity(poisson)
