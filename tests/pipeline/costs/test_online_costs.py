"""Averages by rows, and stage times derived from step timings."""

from __future__ import annotations

import pytest

from moe_serve.pipeline.costs.online_costs import OnlineCosts, RowAverages
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepCosts, step_time
from tests.support.pipeline.synthetic_costs import NUM_LAYERS, simulated_timing, synthetic_costs

RANKS = Ranks(num_attention=2, num_experts=2)


def test_straight_lines_between_measurements() -> None:
    averages = RowAverages()
    averages.observe(10, 1.0)
    averages.observe(20, 3.0)
    assert averages.seconds(15) == pytest.approx(2.0)
    assert averages.seconds(5) == pytest.approx(0.75), "half fixed, half growing"
    assert averages.seconds(40) == pytest.approx(4.5)
    assert averages.seconds(0) == 0.0


def test_near_rows_share_an_average_that_follows() -> None:
    averages = RowAverages()
    for _ in range(40):
        averages.observe(100, 1.0)
    version = averages.version
    for _ in range(40):
        averages.observe(105, 2.0)
    assert averages.seconds(100) == pytest.approx(2.0, rel=0.01)
    assert averages.version > version, "a new version, since predictions changed"


def test_noise_makes_no_new_version() -> None:
    averages = RowAverages()
    for step in range(100):
        averages.observe(8, 1.0 + 0.02 * (-1) ** step)
    assert averages.version == 1


@pytest.mark.parametrize("num_sequences", [2, 64])
def test_finds_the_stages_times(num_sequences: int) -> None:
    costs, online = synthetic_costs(), OnlineCosts(NUM_LAYERS)
    loads = [BatchLoad.decode(num_sequences, 100)] * 2
    assert not online.is_ready
    online.observe(loads, 1, simulated_timing(costs, loads, 1, RANKS))
    assert online.is_ready
    (found,) = online.layer_times([loads], RANKS)
    (true,) = costs.layer_times([loads], RANKS)
    assert found.attention_s == pytest.approx(true.attention_s)
    assert found.experts_s == pytest.approx(true.experts_s)
    assert found.transfer_s == pytest.approx(true.transfer_s)
    assert online.fixed_seconds(loads) == pytest.approx(costs.fixed_seconds(loads))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_calibrated_and_measured_costs_predict_the_same_step(num_parts: int) -> None:
    """Both come through `StepCosts`; the measured ones have seen only steps of the calibrated
    ones."""
    calibrated, measured = synthetic_costs(weights=0.0), OnlineCosts(NUM_LAYERS)
    models: tuple[StepCosts, ...] = (calibrated, measured)
    loads = [BatchLoad.decode(16, 100)] * 2
    halves = [load.split(2)[0] for load in loads]
    for seen in (loads, halves):
        measured.observe(seen, 1, simulated_timing(calibrated, seen, 1, RANKS))
    first, second = (step_time(costs, loads, num_parts, RANKS) for costs in models)
    assert second == pytest.approx(first, rel=0.05)
    assert all(costs.is_ready for costs in models)


def test_one_device_with_everything_waits_for_no_message() -> None:
    costs, online = synthetic_costs(transfer=0.0), OnlineCosts(NUM_LAYERS)
    load, alone = BatchLoad.decode(16, 100), Ranks(num_attention=1, num_experts=1)
    online.observe([load], 1, simulated_timing(costs, [load], 1, alone))
    assert online.colocated_time(load) == pytest.approx(step_time(costs, [load], 1, alone))
