"""From step plans and reports to choices."""

from __future__ import annotations

import numpy as np

from moe_serve.cluster.messages import StageSeconds
from moe_serve.cluster.step_cutter import StepCutter
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.batch_load import BatchLoad
from moe_serve.pipeline.cost_model import Ranks
from synthetic_costs import NUM_LAYERS, simulated_timing, synthetic_costs

RANKS = Ranks(num_attention=1, num_experts=1)


def plan_of(num_sequences: int) -> StepPlan:
    token = np.zeros(1, dtype=np.int64)
    slices = tuple(SequenceSlice(i, 99, token, (), 1) for i in range(num_sequences))
    return StepPlan((MicroBatch(slices),))


def test_learns_from_reports() -> None:
    costs, cutter = synthetic_costs(), StepCutter(RANKS, NUM_LAYERS)
    loads = [BatchLoad.decode(128, 100)]
    timings = {m: simulated_timing(costs, loads, m, RANKS) for m in range(1, 5)}
    for _ in range(30):
        timing = timings[cutter.choose([plan_of(128)])]
        attention = StageSeconds(busy=timing.attention_s, waiting=timing.wait_s)
        cutter.observe(timing.seconds, [attention], [StageSeconds(busy=timing.experts_s)])
    best = min(timing.seconds for timing in timings.values())
    assert timings[cutter.choose([plan_of(128)])].seconds <= 1.05 * best, cutter.last.explain()
    assert sum(cutter.counts.values()) == 31
    assert cutter.counts[1, "not measured yet"] == 1


def test_a_configured_number_is_kept_up_to_the_sequences_there_are() -> None:
    cutter = StepCutter(RANKS, NUM_LAYERS, fixed=3)
    assert [cutter.choose([plan_of(n)]) for n in (1, 2, 3, 9)] == [1, 2, 3, 3]
    assert cutter.last.reason == "configured"
    cutter.observe(1.0, [StageSeconds(busy=1.0)], [StageSeconds(busy=1.0)])


def test_ranks_without_clocks_teach_nothing() -> None:
    cutter = StepCutter(RANKS, NUM_LAYERS)
    for _ in range(3):
        assert cutter.choose([plan_of(8)]) == 1
        cutter.observe(1.0, [StageSeconds(whole=1.0)], [StageSeconds(whole=1.0)])
    assert cutter.last.reason == "not measured yet"


def test_a_calibration_is_used_from_the_first_step() -> None:
    cutter = StepCutter(RANKS, NUM_LAYERS, costs=synthetic_costs(transfer=0.0))
    assert cutter.choose([plan_of(128)]) >= 1
    assert cutter.last.seconds, "predicted before anything was measured"
