"""Fits of measured layouts: whole steps, attention ranks of several processes, shares."""

from __future__ import annotations

import pytest

from moe_serve.config.cells import CellShape
from moe_serve.errors import ConfigError
from moe_serve.pipeline.costs.cost_model import AttentionCost
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.pipeline.costs.whole_step import WholeStep, busiest
from moe_serve.planning.layout_fits import (
    check_num_processes,
    parse_layouts,
    share_of,
    with_layout,
)
from moe_serve.planning.rank_steps import PairRates, RankStep, RankSteps
from tests.support.cluster.calibrations import cpu_calibration

TP2 = CellShape(attention_ranks=1, expert_ranks=1, attention_tp=2)
LOADS = [BatchLoad.decode(n, c) for n in (1, 2, 4, 8, 16, 32) for c in (32, 128, 512)]
LOADS += [BatchLoad.of_parts([0], [n]) for n in (8, 32, 128, 512, 1024)]
LOADS += [BatchLoad.of_parts([0] + [300] * 7, [n] + [1] * 7) for n in (8, 64, 256, 900)]


def test_a_measured_layout_is_predicted_and_its_shards_are_known() -> None:
    """Steps and attention times that follow the laws are found again: the whole steps of 1A1E tp2,
    and the attention stage of two processes without the messages to the experts."""
    costs = cpu_calibration().costs
    sharded = AttentionCost(alpha_s=3e-5, row_s=2e-6, kv_token_s=1e-8, pair_s=1e-9)
    law = WholeStep(
        alpha_s=2e-3, row_s=9e-5, kv_token_s=6e-7, pair_s=1e-7, expert_s=1e-5, sequence_s=2e-4,
        few_rows_s=(3e-4, 0.0, 0.0),
    )  # fmt: skip
    steps = tuple(
        RankStep(
            loads=(load,),
            seconds=law.seconds(load, costs.experts.num_activated(load.num_rows)),
            attention_s=6 * sharded.seconds(load) + costs.handling_seconds(load),
            num_micro_batches=1,
        )
        for load in LOADS
    )
    found = with_layout(costs, TP2, RankSteps(steps, 1.5), 0.8, lambda name, fit: None)
    step = found.layout_step(1, 1, 2)
    assert step is not None and step.name == "1A1E tp2" and step.machine_share == 0.8
    for load, measured in zip(LOADS, steps, strict=True):
        assert found.layout_seconds(step, [load]) == pytest.approx(measured.seconds, rel=1e-4)
    assert found.shard_counts == (1, 2) and costs.shard_counts == (1,)
    assert found.with_shards(2).layers[0].attention.seconds(LOADS[3]) == pytest.approx(
        sharded.seconds(LOADS[3]), rel=1e-4
    )
    again = with_layout(found, TP2, RankSteps(steps, 1.5), 0.9, lambda name, fit: None)
    assert [each.machine_share for each in again.layouts] == [0.9], "measured again, not twice"


def test_the_busiest_rank_counts_and_all_rows_go_to_the_experts() -> None:
    prompt, answers = BatchLoad.of_parts([0], [200]), BatchLoad.decode(8, 100)
    most = busiest([prompt, answers])
    assert (most.num_rows, most.num_sequences, most.num_kv_tokens) == (200, 8, 800)
    assert most.num_pairs == prompt.num_pairs and busiest([answers]) == answers


@pytest.mark.parametrize(
    ("alone", "both", "busy", "share"),
    [((100.0, 200.0), (160.0, 320.0), 0.4, 0.625), ((100.0,), (200.0,), 0.4, 0.4),
     ((100.0,), (210.0,), 0.9, 0.5)],
)  # fmt: skip
def test_the_share_of_the_machine_makes_two_cells_as_slow_as_measured(
    alone: tuple[float, ...], both: tuple[float, ...], busy: float, share: float
) -> None:
    assert share_of([PairRates(alone, both)], busy) == pytest.approx(share)


def test_layouts_are_written_as_cells_are() -> None:
    assert [each.ranks for each in parse_layouts("1A2E,1a2e, 2A2E tp2")] == ["1A2E", "2A2E tp2"]
    with pytest.raises(ConfigError, match="layouts has 1A5000E, which takes 5001 processes"):
        check_num_processes(parse_layouts("1A1E,1A5000E"))
    with pytest.raises(ConfigError, match="layouts cannot be"):
        parse_layouts("1A")
