"""The router's kernel against the plain one: equal ids, close weights, exact counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.router.api import route as route_gpu
from moe_kernels.gpu.router.heuristics import RouterConfig, router_config
from moe_kernels.interface.routing import RouterShape, route

SHAPES = {
    "mixtral": RouterShape(num_experts=8, top_k=2, is_renormalised=True),
    "olmoe": RouterShape(num_experts=64, top_k=8, is_renormalised=False),
    "qwen3": RouterShape(num_experts=128, top_k=8, is_renormalised=True),
    "one expert": RouterShape(num_experts=1, top_k=1, is_renormalised=False),
    "all experts": RouterShape(num_experts=16, top_k=16, is_renormalised=True),
    "odd": RouterShape(num_experts=60, top_k=4, is_renormalised=False),
    "llama4": RouterShape(num_experts=16, top_k=1, is_renormalised=False, scoring="sigmoid"),
    "deepseek-v2": RouterShape(
        num_experts=160,
        top_k=6,
        is_renormalised=False,
        num_groups=8,
        num_groups_kept=3,
        scaling=16.0,
    ),
    "deepseek-v3": RouterShape(
        num_experts=256,
        top_k=8,
        is_renormalised=True,
        scoring="sigmoid",
        renorm_floor=1e-20,
        num_groups=8,
        num_groups_kept=4,
        group_score="top2",
        scaling=2.5,
    ),
    "kimi-k2": RouterShape(
        num_experts=384, top_k=8, is_renormalised=True, scoring="sigmoid", scaling=2.827
    ),
    "odd groups": RouterShape(
        num_experts=21, top_k=2, is_renormalised=True, num_groups=3, num_groups_kept=2
    ),
    "wide": RouterShape(num_experts=512, top_k=10, is_renormalised=True),
}


def make_logits(num_rows: int, num_experts: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_experts)
    return torch.randn(num_rows, num_experts, generator=generator).to(device) * 2


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", SHAPES)
def test_route_is_the_reference(name: str, has_bias: bool, device: torch.device) -> None:
    shape = SHAPES[name]
    logits = make_logits(5, shape.num_experts, device)
    bias = make_logits(1, shape.num_experts, device)[0] / 20 if has_bias else None
    routed = route_gpu(logits, shape, bias)
    ids, weights = route(logits, shape, bias)
    assert torch.equal(routed.ids_TK, ids), f"{name}: {routed.ids_TK} instead of {ids}"
    torch.testing.assert_close(routed.weights_TK, weights, rtol=1e-5, atol=1e-9)
    assert routed.counts_E is not None
    expected = torch.bincount(ids.flatten(), minlength=shape.num_experts)
    assert torch.equal(routed.counts_E.long(), expected), f"{name}: the counts are wrong"


def test_a_row_depends_on_itself_alone(device: torch.device) -> None:
    shape = SHAPES["deepseek-v3"]
    wide = make_logits(6, 2 * shape.num_experts, device)
    logits = wide[:, : shape.num_experts]  # rows with a stride
    whole = route_gpu(logits, shape)
    for row in range(6):
        alone = route_gpu(logits[row : row + 1], shape, has_counts=False)
        assert alone.counts_E is None
        assert torch.equal(alone.ids_TK[0], whole.ids_TK[row]), f"row {row}"
        assert torch.equal(alone.weights_TK[0], whole.weights_TK[row]), f"row {row}"


@pytest.mark.parametrize("name", ["mixtral", "odd", "llama4", "deepseek-v3"])
def test_ties_go_to_the_lower_id(name: str, device: torch.device) -> None:
    shape = SHAPES[name]
    equal = route_gpu(torch.zeros(2, shape.num_experts, device=device), shape)
    lowest = list(range(shape.top_k))
    assert equal.ids_TK.tolist() == [lowest, lowest], f"{name}: {equal.ids_TK.tolist()}"


def test_a_tie_of_groups_goes_to_the_lower_group(device: torch.device) -> None:
    shape = replace(SHAPES["odd groups"], num_groups_kept=1)
    logits = torch.zeros(1, 21, device=device)
    logits[0, [9, 10, 20]] = 1.0  # groups 1 and 2 tie; of group 1 the experts 9 and 10
    assert route_gpu(logits, shape).ids_TK.tolist() == [[9, 10]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3"])
def test_faulty_logits_give_valid_ids(name: str, bad: float, device: torch.device) -> None:
    shape = SHAPES[name]
    logits = make_logits(3, shape.num_experts, device)
    logits[1] = bad
    routed = route_gpu(logits, shape)
    for row in routed.ids_TK.tolist():
        assert row == sorted(set(row)) and row[0] >= 0 and row[-1] < shape.num_experts, f"{row}"
    clean = route_gpu(logits[[0, 2]], shape)
    assert torch.equal(routed.weights_TK[[0, 2]], clean.weights_TK), "a neighbour's fault shows"


def test_no_rows(device: torch.device) -> None:
    routed = route_gpu(torch.empty(0, 8, device=device), SHAPES["mixtral"], ids_dtype=torch.int32)
    assert routed.ids_TK.shape == (0, 2) and routed.ids_TK.dtype == torch.int32
    assert routed.counts_E is not None and not routed.counts_E.any()


def test_config_follows_the_shape() -> None:
    assert router_config(SHAPES["odd groups"]) == RouterConfig(block_groups=4, block_size=8)
    assert router_config(SHAPES["kimi-k2"]) == RouterConfig(block_groups=1, block_size=512)
