"""The expert stage by hand, against its float64 definition, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.expert_mlp import (
    ExpertMLP,
    combine_choices,
    routed_experts,
    routed_experts_reference,
)
from moe_kernels.linear import PlainLinear, make_linear

Weights = list[tuple[Tensor, Tensor, Tensor]]


def make_experts(
    num: int, width: int, hidden: int, dtype: torch.dtype
) -> tuple[Weights, list[ExpertMLP]]:
    generator = torch.Generator().manual_seed(num * width)
    weights = [
        (
            (torch.randn(hidden, width, generator=generator) / width**0.5).to(dtype),
            (torch.randn(hidden, width, generator=generator) / width**0.5).to(dtype),
            (torch.randn(width, hidden, generator=generator) / hidden**0.5).to(dtype),
        )
        for _ in range(num)
    ]
    return weights, [ExpertMLP.from_weights(g.clone(), u.clone(), d.clone()) for g, u, d in weights]


def choose(num_rows: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.stack(
        [
            torch.randperm(num_experts, generator=generator)[:top_k].sort().values
            for _ in range(num_rows)
        ]
    )
    weights = torch.rand(num_rows, top_k, generator=generator)
    return ids, weights / weights.sum(-1, keepdim=True)


def test_by_hand_experts_that_scale() -> None:
    # Expert i gives (i + 1) x: gate 20 I (silu(20 x) = 20 x for x = 1), up I, down (i + 1) / 20 I.
    eye = torch.eye(4)
    experts = [ExpertMLP.from_weights(20 * eye, eye, (i + 1) / 20 * eye) for i in range(3)]
    x = torch.ones(2, 4)
    out = routed_experts(
        x, torch.tensor([[0, 2], [1, 2]]), torch.tensor([[0.5, 0.5], [0.25, 0.75]]), experts
    )
    # Row 0: 0.5 * 1 + 0.5 * 3 = 2. Row 1: 0.25 * 2 + 0.75 * 3 = 2.75.
    assert torch.allclose(out, torch.tensor([[2.0] * 4, [2.75] * 4]), atol=1e-5), out


CASES = [(1, 8, 2), (2, 8, 8), (5, 8, 1), (64, 32, 4), (300, 8, 2)]


@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_matches_the_definition(
    num_rows: int, num_experts: int, top_k: int, dtype: torch.dtype, tolerance: float
) -> None:
    weights, experts = make_experts(num_experts, 48, 40, dtype)
    ids, row_weights = choose(num_rows, num_experts, top_k)
    x = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = routed_experts(x, ids, row_weights, experts)
    expected = routed_experts_reference(x, ids, row_weights, weights)
    error = ((out - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{num_rows=}, {num_experts=}, {top_k=}, {dtype=}, {error=}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_in_company(dtype: torch.dtype) -> None:
    _, experts = make_experts(8, 48, 96, dtype)
    ids, row_weights = choose(600, 8, 2)
    x = torch.randn(600, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    together = routed_experts(x, ids, row_weights, experts)
    for part in [
        slice(0, 1),
        slice(17, 18),
        slice(3, 8),
        slice(100, 163),
        slice(599, 600),
        slice(0, 599),
    ]:
        alone = routed_experts(x[part], ids[part], row_weights[part], experts)
        assert torch.equal(alone, together[part]), f"{dtype=}, {part=}"


def test_an_expert_that_no_row_chose_may_be_absent() -> None:
    _, experts = make_experts(4, 16, 16, torch.float32)
    ids, row_weights = torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
    x = torch.randn(1, 16)
    full = routed_experts(x, ids, row_weights, experts)
    assert torch.equal(
        routed_experts(x, ids, row_weights, [experts[0], None, None, experts[3]]), full
    )
    with pytest.raises(AssertionError, match="expert 3, which is not here"):
        routed_experts(x, ids, row_weights, [experts[0], None, None, None])


def test_combine_adds_in_ascending_order() -> None:
    # In fp32, 1e8 + 1 is 1e8: the order shows.
    ones = torch.ones(1, 3)
    assert combine_choices(torch.tensor([[[1e8], [1.0], [-1e8]]]), ones).item() == 0.0
    assert combine_choices(torch.tensor([[[1e8], [-1e8], [1.0]]]), ones).item() == 1.0


@pytest.mark.parametrize("kind", ["made", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 256), (256, 96), (32, 64), (20, 40)])
def test_linears_are_row_invariant(
    kind: str, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    x = torch.randn(1100, inputs, generator=generator).to(dtype)
    linear = make_linear(weight.clone()) if kind == "made" else PlainLinear(weight)
    whole, silu = linear(x), linear.silu(x)
    times = linear.times(x, whole)
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 64, 129, 500, 1000):
        rows = slice(41, 41 + count)
        assert torch.equal(linear(x[rows]), whole[rows]), f"{kind}, {dtype}, {count=}"
        assert torch.equal(linear.silu(x[rows]), silu[rows]), f"{kind}, {dtype}, {count=}: silu"
        assert torch.equal(linear.times(x[rows], whole[rows]), times[rows]), f"{count=}: times"
