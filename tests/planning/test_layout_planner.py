"""Plans: a case in which separate pools win, one in which they lose, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moe_serve.errors import ConfigError
from moe_serve.pipeline.costs.cost_model import ShardedAttention
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, step_time
from moe_serve.planning.layout_planner import (
    PlannedLayout,
    PlanRequest,
    plan_layouts,
    simulated_step_s,
)
from moe_serve.planning.plan_verdict import verdict
from tests.support.cluster.calibrations import GIB, cpu_calibration, gpu_calibration

MEMORY = 141 * 10**9
LONG = PlanRequest(num_devices=8, context=8192, memory_bytes=MEMORY, max_tpot_s=0.05)


def best(layouts: list[PlannedLayout], kind: str) -> PlannedLayout:
    return next(layout for layout in layouts if layout.kind == kind)


def test_wins_where_memory_for_keys_bounds_the_batch() -> None:
    layouts = plan_layouts(gpu_calibration(), LONG)
    split, whole = layouts[0], best(layouts, "replicated")
    answer = verdict(layouts, LONG)
    assert answer.is_worth_it and split.kind == "disaggregated", answer.sentence
    assert answer.sentence.startswith("disaggregation wins: "), answer.sentence
    per_attention, per_replica = split.batch / split.num_attention, whole.batch / 8
    assert per_attention > 1.5 * per_replica, "more KV pages on a device are what wins"
    identity = (
        (per_attention / per_replica)
        * (split.num_attention / split.num_devices)
        * (whole.step_s / split.step_s)
    )
    assert identity == pytest.approx(answer.gain), "FastAFD's identity is exact"
    assert split.num_attention > split.num_experts, "experts are shared by many"


def test_loses_where_everything_fits_everywhere() -> None:
    request = PlanRequest(num_devices=4, context=512, batch=64)
    layouts = plan_layouts(cpu_calibration(), request)
    answer = verdict(layouts, request)
    assert layouts[0].kind == "replicated" and not answer.is_worth_it, answer.sentence
    assert "is not worth it here: 4 replicas give" in answer.sentence
    assert answer.gain is not None and f"({100 * (answer.gain - 1):+.0f}%" in answer.sentence


def test_every_split_and_the_others_are_there() -> None:
    layouts = plan_layouts(cpu_calibration(), PlanRequest(num_devices=4, context=512, batch=64))
    splits = {(x.num_attention, x.num_experts, x.num_micro_batches) for x in layouts}
    assert {(a, 4 - a, m) for a in (1, 2, 3) for m in (1, 2, 3, 4)} <= splits
    assert {"colocated", "replicated", "expert-parallel"} <= {x.kind for x in layouts}
    assert not best(layouts, "expert-parallel").is_served
    assert [x.name for x in layouts if x.kind == "colocated"] == ["colocated, 1 device"]
    speeds = [x.tokens_per_s for x in layouts if not x.reason]
    assert speeds == sorted(speeds, reverse=True), "best first"


def test_the_batch_is_the_largest_within_the_bounds() -> None:
    for layout in plan_layouts(gpu_calibration(), LONG):
        if layout.reason:
            continue
        assert layout.step_s <= 0.05, layout
        assert max(layout.attention_bytes, layout.expert_bytes) <= MEMORY, layout
        one_more = plan_layouts(
            gpu_calibration(),
            PlanRequest(
                num_devices=layout.num_devices,
                context=8192,
                batch=layout.batch + layout.num_attention,
                memory_bytes=MEMORY,
                max_tpot_s=0.05,
            ),
        )
        same = next(x for x in one_more if x.name == layout.name)
        assert same.reason, f"{layout.name} could hold more than {layout.batch}"


def test_the_formula_is_near_the_simulation() -> None:
    for calibration, context in ((gpu_calibration(), 8192), (cpu_calibration(), 512)):
        request = PlanRequest(num_devices=6, context=context, batch=100)
        splits = [x for x in plan_layouts(calibration, request) if x.kind == "disaggregated"]
        assert len(splits) == 20
        for layout in splits:
            simulated = simulated_step_s(calibration, layout, context)
            assert layout.step_s == pytest.approx(simulated, rel=0.15), layout.name


def test_a_rate_takes_the_shortest_steps_that_reach_it() -> None:
    request = PlanRequest(num_devices=4, context=512, rate=3000.0)
    layouts = plan_layouts(cpu_calibration(), request)
    usable = [x for x in layouts if not x.reason]
    assert all(x.tokens_per_s >= 3000.0 for x in usable)
    assert [x.step_s for x in usable] == sorted(x.step_s for x in usable)
    too_much = PlanRequest(num_devices=4, context=512, rate=1e9)
    nothing = plan_layouts(cpu_calibration(), too_much)
    assert all(x.reason.startswith("reaches ") for x in nothing)
    assert verdict(nothing, too_much).sentence.startswith("no layout of these devices can do this")


def test_what_does_not_fit_says_so() -> None:
    small = PlanRequest(num_devices=4, context=4096, memory_bytes=60 * GIB)
    layouts = plan_layouts(gpu_calibration(), small)
    assert "needs 118." in best(layouts, "replicated").reason
    answer = verdict(layouts, small)
    assert answer.is_worth_it and "only disaggregation can do this" in answer.sentence
    one = PlanRequest(num_devices=1, context=4096, batch=4)
    assert "it needs 2 devices" in verdict(plan_layouts(gpu_calibration(), one), one).sentence


def test_too_few_sequences_are_not_split() -> None:
    request = PlanRequest(num_devices=2, context=512, batch=2)
    for layout in plan_layouts(cpu_calibration(), request):
        assert bool(layout.reason) == (layout.num_micro_batches > 2), layout
        if layout.reason:
            needed = layout.num_micro_batches
            assert layout.reason == f"2 sequences are too few: it takes {needed}"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PlanRequest(num_devices=0, context=9, batch=1), r"devices must be in \[1, 1024\], got 0"),
        (
            PlanRequest(num_devices=2, context=9999, batch=1),
            r"must be 1 to 2048 tokens for made-up, got 9999\.",
        ),
        (PlanRequest(num_devices=2, context=9, batch=1, rate=1.0), "a batch or a rate, not both"),
        (PlanRequest(num_devices=2, context=9, batch=0), r"batch must be in \[1, 65536\], got 0"),
        (PlanRequest(num_devices=2, context=9, max_tpot_s=0.0), "max-tpot-ms must be .*, got 0"),
        (
            PlanRequest(num_devices=2, context=9, max_tpot_s=math.nan),
            "max-tpot-ms must be .*, got nan",
        ),
        (PlanRequest(num_devices=2, context=9, rate=math.inf), "rate must be .*, got inf"),
        (PlanRequest(num_devices=2, context=9), "give at least one of: a batch, a rate"),
    ],
)
def test_contradictions_are_one_sentence(request_: PlanRequest, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_layouts(cpu_calibration(), request_)


def test_attention_ranks_of_several_devices_are_planned_if_they_were_calibrated() -> None:
    """With two devices an attention rank reads half of the keys, which takes half of the time."""
    calibration, request = gpu_calibration(), PlanRequest(num_devices=4, context=8192, batch=64)
    layer = calibration.costs.layers[0]
    half = replace(layer.attention, kv_token_s=layer.attention.kv_token_s / 2)
    costs = replace(calibration.costs, sharded=(ShardedAttention(num_shards=2, attention=half),))
    found = plan_layouts(replace(calibration, costs=costs), request)
    by_name = {each.name: each for each in found}
    assert "1A2E tp2 m=1" in by_name and "2A2E m=1" in by_name and "1A1E tp2 m=1" not in by_name
    assert all("tp2" not in each.name for each in plan_layouts(calibration, request))
    split = by_name["1A2E tp2 m=1"]
    loads = [BatchLoad.decode(64, 8192)]
    ranks = Ranks(num_attention=1, num_experts=2)
    assert split.step_s == pytest.approx(step_time(costs.with_shards(2), loads, 1, ranks))
    assert split.step_s < step_time(costs, loads, 1, ranks)
