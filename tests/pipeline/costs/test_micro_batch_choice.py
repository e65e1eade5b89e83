"""The choice of micro-batches against brute force in the discrete simulation."""

from __future__ import annotations

import random

import pytest

from moe_serve.pipeline.costs.cost_model import StageCosts
from moe_serve.pipeline.costs.micro_batch_choice import MicroBatchChooser
from moe_serve.pipeline.costs.online_costs import OnlineCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepTiming
from tests.support.pipeline.synthetic_costs import NUM_LAYERS, simulated_timing, synthetic_costs

BATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 33, 48, 64, 96, 128)
RANKS = Ranks(num_attention=1, num_experts=1)
MACHINES = {
    "balanced": synthetic_costs(),
    "slow attention": synthetic_costs(attention=4.0),
    "slow experts": synthetic_costs(experts=4.0),
    "heavy expert weights": synthetic_costs(weights=8.0),
    "slow link": synthetic_costs(transfer=6.0),
    "no link": synthetic_costs(transfer=0.0),
    "dense first": synthetic_costs(num_dense=2),
}


def all_timings(
    costs: StageCosts, loads: list[BatchLoad], ranks: Ranks = RANKS
) -> dict[int, StepTiming]:
    most = min(4, max(load.num_sequences for load in loads))
    return {m: simulated_timing(costs, loads, m, ranks) for m in range(1, most + 1)}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("pools", [(1, 1), (2, 1), (2, 3)])
def test_calibrated_is_within_5_percent_of_the_best(name: str, pools: tuple[int, int]) -> None:
    costs, ranks = MACHINES[name], Ranks(num_attention=pools[0], num_experts=pools[1])
    chooser = MicroBatchChooser(costs, ranks)
    for batch in BATCHES:
        loads = [BatchLoad.decode(batch, 200)] * ranks.num_attention
        timings = all_timings(costs, loads, ranks)
        best = min(timing.seconds for timing in timings.values())
        choice = chooser.choose(loads)
        for _ in range(12):  # past the trials
            chooser.observe(loads, choice, timings[choice.num_micro_batches])
            choice = chooser.choose(loads)
        assert timings[choice.num_micro_batches].seconds <= 1.05 * best, (batch, choice.explain())


@pytest.mark.parametrize("name", MACHINES)
def test_measured_online_is_within_5_percent_in_all(name: str) -> None:
    """All steps count, including trials; the clocks are off by 3%."""
    costs, noise = MACHINES[name], random.Random(0)
    chooser = MicroBatchChooser(
        OnlineCosts(NUM_LAYERS + costs.layers[0].num_layers % NUM_LAYERS), RANKS
    )
    total = best = 0.0
    for batch in BATCHES:
        loads = [BatchLoad.decode(batch, 200)]
        timings = all_timings(costs, loads)
        for _ in range(100):
            choice = chooser.choose(loads)
            timing = timings[choice.num_micro_batches]
            total += timing.seconds
            best += min(t.seconds for t in timings.values())
            chooser.observe(loads, choice, scaled(timing, noise.gauss(1.0, 0.03)))
    assert total <= 1.05 * best, f"{name}: {total / best:.3f} times the best"


@pytest.mark.parametrize("name", MACHINES)
def test_a_noisy_machine_costs_little(name: str) -> None:
    """Steps scatter by 10% and every 50th takes twice as long; trials do not count."""
    costs, noise = MACHINES[name], random.Random(7)
    total = best = 0.0
    for batch in BATCHES[1:]:
        loads = [BatchLoad.decode(batch, 200)]
        chooser = MicroBatchChooser(OnlineCosts(NUM_LAYERS), RANKS)
        timings = all_timings(costs, loads)
        for step in range(64):
            choice = chooser.choose(loads)
            timing = timings[choice.num_micro_batches]
            if step >= 16:
                total += timing.seconds
                best += min(t.seconds for t in timings.values())
            pause = 2.0 if noise.random() < 0.02 else 1.0
            chooser.observe(loads, choice, scaled(timing, pause * noise.lognormvariate(0, 0.1)))
    assert total <= 1.05 * best, f"{name}: {total / best:.3f} times the best"


def scaled(timing: StepTiming, factor: float) -> StepTiming:
    return StepTiming(
        seconds=timing.seconds * factor,
        attention_s=timing.attention_s * factor,
        experts_s=timing.experts_s * factor,
        wait_s=timing.wait_s * factor,
    )


def test_never_more_than_the_sequences_there_are() -> None:
    chooser = MicroBatchChooser(MACHINES["no link"], Ranks(num_attention=2, num_experts=1))
    for most in (1, 2, 3):
        choice = chooser.choose([BatchLoad.decode(1, 50), BatchLoad.decode(most, 50)])
        assert choice.num_micro_batches <= most, choice
    alone = chooser.choose([BatchLoad.decode(1, 50)])
    assert (alone.num_micro_batches, alone.reason) == (1, "one sequence")
    capped = MicroBatchChooser(MACHINES["no link"], RANKS, max_micro_batches=2)
    assert capped.choose([BatchLoad.decode(128, 50)]).num_micro_batches <= 2


def test_one_where_splitting_costs_more() -> None:
    """A second read of the expert weights costs more than the overlap saves."""
    chooser = MicroBatchChooser(synthetic_costs(weights=50.0, attention=0.1), RANKS)
    choice = chooser.choose([BatchLoad.decode(4, 50)])
    assert choice.seconds[0] < choice.seconds[1], choice.explain()
    assert (
        MicroBatchChooser(MACHINES["balanced"], RANKS)
        .choose([BatchLoad.decode(128, 50)])
        .seconds[1]
        < 0.75
        * MicroBatchChooser(MACHINES["balanced"], RANKS)
        .choose([BatchLoad.decode(128, 50)])
        .seconds[0]
    )


def test_without_calibration_the_first_step_measures() -> None:
    costs, online = MACHINES["balanced"], OnlineCosts(NUM_LAYERS)
    chooser, loads = MicroBatchChooser(online, RANKS), [BatchLoad.decode(64, 100)]
    first = chooser.choose(loads)
    assert (first.num_micro_batches, first.reason) == (1, "not measured yet")
    chooser.observe(loads, first, simulated_timing(costs, loads, 1, RANKS))
    assert chooser.choose(loads).seconds, "one measured step is enough to predict"


def test_a_wrong_calibration_is_corrected_by_what_steps_take() -> None:
    """The file claims that splitting doubles the speed; this machine has a slow link."""
    real, loads = synthetic_costs(transfer=1.0, weights=30.0), [BatchLoad.decode(16, 100)]
    chooser = MicroBatchChooser(synthetic_costs(transfer=0.0, weights=0.1), RANKS)
    timings = all_timings(real, loads)
    for _ in range(20):
        choice = chooser.choose(loads)
        chooser.observe(loads, choice, timings[choice.num_micro_batches])
    best = min(timings, key=lambda m: timings[m].seconds)
    assert chooser.choose(loads).num_micro_batches == best


@pytest.mark.parametrize("slower", [1.0, 0.2, 8.0])
def test_a_first_estimate_that_is_far_off_turns_nobody_away(slower: float) -> None:
    """The only measured step has prompts, whose rows took another time than rows here."""
    costs = MACHINES["balanced"]
    chooser = MicroBatchChooser(OnlineCosts(NUM_LAYERS), RANKS)
    prompts = BatchLoad(
        num_rows=1024, num_sequences=128, num_kv_tokens=1024, num_pairs=4096, num_largest=8
    )
    first = chooser.choose([prompts])
    timing = simulated_timing(costs, [prompts], 1, RANKS)
    chooser.observe([prompts], first, scaled(timing, slower))
    loads = [BatchLoad.decode(128, 32)]
    timings = all_timings(costs, loads)
    for _ in range(14):
        choice = chooser.choose(loads)
        chooser.observe(loads, choice, timings[choice.num_micro_batches])
    best = min(timing.seconds for timing in timings.values())
    choice = chooser.choose(loads)
    assert timings[choice.num_micro_batches].seconds <= 1.05 * best, choice.explain()


def test_what_was_tried_in_a_slow_second_is_tried_again() -> None:
    """While two micro-batches were tried, steps took 1.45 times as long as usual."""
    costs, loads = MACHINES["balanced"], [BatchLoad.decode(64, 100)]
    chooser, timings = MicroBatchChooser(OnlineCosts(NUM_LAYERS), RANKS), all_timings(costs, loads)
    best = min(timings, key=lambda m: timings[m].seconds)
    taken = []
    for step in range(100):
        choice = chooser.choose(loads)
        taken.append(choice.num_micro_batches)
        is_slow = step < 16 and choice.num_micro_batches != 1
        chooser.observe(loads, choice, scaled(timings[taken[-1]], 1.45 if is_slow else 1.0))
    assert 1 in taken[16:24], f"the slow second misled nobody: {taken}"
    right = [timings[m].seconds <= 1.05 * timings[best].seconds for m in taken[60:]]
    assert sum(right) >= 36, taken


def test_a_chunk_and_decodes_in_one_step() -> None:
    costs = MACHINES["balanced"]
    load = BatchLoad(
        num_rows=264, num_sequences=9, num_kv_tokens=1200, num_pairs=33_000, num_largest=256
    )
    choice = MicroBatchChooser(costs, RANKS).choose([load])
    timings = all_timings(costs, [load])
    best = min(timing.seconds for timing in timings.values())
    assert min(choice.seconds) == pytest.approx(best, rel=0.15)


def test_explain_names_all_predictions() -> None:
    choice = MicroBatchChooser(MACHINES["balanced"], RANKS).choose([BatchLoad.decode(3, 50)])
    text = choice.explain()
    assert text.startswith(f"m = {choice.num_micro_batches}: ") and "3: " in text, text
    assert "4: " not in text, "there are three sequences"
