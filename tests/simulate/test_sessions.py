"""Turns of sessions in a simulation come in order, each after the answer to the one before."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from moe_serve.bench.simulated_run import SimulatedRun, run_simulation
from moe_serve.bench.workload.trace_rows import Trace, TraceRow
from moe_serve.bench.workload.workload import Workload
from moe_serve.config.sections import SchedulerConfig
from moe_serve.simulate.catalogue import find_device, find_model
from moe_serve.simulate.costs.device import read_device
from moe_serve.simulate.costs.model_shape import read_model_shape
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import CellSettings, on_device


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    layout = Layout.parse("colocated", 1)
    shape = read_model_shape(find_model("qwen3-30b"), "fp8")
    rows = [
        TraceRow(
            at_s=0.01 * n, prompt_tokens=50, output_tokens=20, session=f"s{n % 3}" if n else ""
        )
        for n in range(13)
    ]
    return SimulatedRun(
        model=on_device(shape, read_device(find_device("h200")), layout, None),
        settings=CellSettings(
            layout=layout, scheduler=SchedulerConfig(max_num_seqs=8), max_model_len=256
        ),
        workload=Workload(seed=0, trace=Trace(rows=tuple(rows))),
    )


def test_a_turn_comes_when_the_answer_before_has_ended(run: SimulatedRun) -> None:
    records = run_simulation(run).records
    assert len(records) == 13
    num_held = 0
    for session in ("s0", "s1", "s2"):
        turns = [record for record in records if record.session == session]
        for before, turn in pairwise(turns):
            recorded_s = 0.01 * turn.index
            assert turn.scheduled_s == pytest.approx(max(recorded_s, before.end_s))
            num_held += turn.scheduled_s > recorded_s + 1e-9
    assert num_held >= 3, "an answer takes longer than three times 10 ms"


def test_without_sessions_all_come_at_their_times(run: SimulatedRun) -> None:
    trace = run.workload.trace
    assert trace is not None
    plain = replace(trace, rows=tuple(replace(row, session="") for row in trace.rows))
    records = run_simulation(replace(run, workload=replace(run.workload, trace=plain))).records
    assert [r.scheduled_s for r in records] == [pytest.approx(0.01 * r.index) for r in records]
