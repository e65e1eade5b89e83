"""Costs of stages: terms on paper, and the cost of splitting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.pipeline.costs.cost_model import AttentionCost, Experts, Line, LinkCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, step_time
from tests.support.pipeline.synthetic_costs import synthetic_costs

NONE = Line(0.0, 0.0)
ONE_EACH = Ranks(num_attention=1, num_experts=1)


def test_line() -> None:
    assert Line(2.0, 0.5).seconds(10) == 7.0


def test_attention_adds_its_terms_and_nothing_costs_nothing() -> None:
    cost = AttentionCost(alpha_s=1.0, row_s=10.0, kv_token_s=0.1, pair_s=0.01)
    assert cost.seconds(BatchLoad.decode(2, 50)) == pytest.approx(1 + 20 + 10 + 1)
    assert cost.seconds(BatchLoad.decode(0, 50)) == 0.0


@pytest.mark.parametrize(("rows", "activated"), [(8, 52), (16, 82), (32, 112), (64, 126)])
def test_activated_experts_as_known(rows: int, activated: int) -> None:
    experts = Experts(num_experts=128, top_k=8, num_effective=128)
    assert experts.num_activated(rows) == pytest.approx(activated, abs=0.6)
    assert experts.num_activated(0) == 0


def test_two_halves_activate_more_than_the_whole() -> None:
    """32 rows, 128 experts, top-8: the halves read 164 expert weights instead of 112."""
    experts = Experts(num_experts=128, top_k=8, num_effective=128)
    assert 2 * experts.num_activated(16) / experts.num_activated(32) == pytest.approx(
        1.47, abs=0.01
    )


def test_more_expert_ranks_shorten_the_expert_stage() -> None:
    costs, loads = synthetic_costs(), [BatchLoad.decode(64, 100)]
    times = [
        costs.layer_times([loads], Ranks(num_attention=1, num_experts=e))[0].experts_s[0]
        for e in (1, 2, 4)
    ]
    assert times[0] > times[1] > times[2], times
    busy = Ranks(num_attention=1, num_experts=4, imbalance=2.0)
    assert costs.layer_times([loads], busy)[0].experts_s[0] > times[2]


def test_the_router_on_the_experts_sends_every_row_everywhere() -> None:
    costs, loads = synthetic_costs(), [BatchLoad.decode(512, 100)]
    ranks = Ranks(num_attention=1, num_experts=16)  # of four choices, few ranks see a row
    on_attention = costs.layer_times([loads], ranks)[0].transfer_s[0]
    everywhere = replace(ranks, is_router_on_experts=True)
    assert costs.layer_times([loads], everywhere)[0].transfer_s[0] > 2 * on_attention


def test_dense_layers_have_no_experts_and_no_transfers() -> None:
    dense, sparse = synthetic_costs(num_dense=2).layer_times([[BatchLoad.decode(4, 9)]], ONE_EACH)
    assert (dense.num_layers, dense.experts_s, dense.transfer_s) == (2, (0.0,), (0.0,))
    assert sparse.experts_s[0] > 0 and sparse.transfer_s[0] > 0


def test_colocated_is_one_micro_batch_without_transfers() -> None:
    costs = replace(synthetic_costs(), link=LinkCosts(attention=NONE, experts=NONE, transfer=NONE))
    load = BatchLoad.decode(16, 100)
    assert costs.colocated_time(load) == pytest.approx(step_time(costs, [load], 1, ONE_EACH))
    many = BatchLoad.decode(128, 100)
    assert step_time(costs, [many], 2, ONE_EACH) < costs.colocated_time(many)
