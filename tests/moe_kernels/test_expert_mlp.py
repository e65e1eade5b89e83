"""The expert stage by hand, against its float64 definition, and row by row."""

from __future__ import annotations

import pytest
import torch
from kernel_sets import KERNEL_SETS, make_kernels
from torch import Tensor

from moe_kernels.choice import KernelsName
from moe_kernels.expert_mlp import combine_choices, routed_experts_reference
from moe_kernels.kernels import ExpertWeights


def make_experts(num: int, width: int, hidden: int, dtype: torch.dtype) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(num * width)

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    return [
        ExpertWeights(weight(hidden, width), weight(hidden, width), weight(width, hidden))
        for _ in range(num)
    ]


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


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_by_hand_experts_that_scale(name: KernelsName) -> None:
    # Expert i gives (i + 1) x: gate 20 I (silu(20 x) = 20 x for x = 1), up I, down (i + 1) / 20 I.
    eye = torch.eye(4)
    bank = make_kernels(name, torch.float32).experts(
        [ExpertWeights(20 * eye, eye, (i + 1) / 20 * eye) for i in range(3)]
    )
    ids, weights = torch.tensor([[0, 2], [1, 2]]), torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    out = bank(torch.ones(2, 4), ids, weights)
    # Row 0: 0.5 * 1 + 0.5 * 3 = 2. Row 1: 0.25 * 2 + 0.75 * 3 = 2.75.
    assert torch.allclose(out, torch.tensor([[2.0] * 4, [2.75] * 4]), atol=1e-5), out


CASES = [(1, 8, 2), (2, 8, 8), (5, 8, 1), (64, 32, 4), (300, 8, 2)]


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), CASES)
@pytest.mark.parametrize("sizes", [(48, 40), (64, 96), (50, 37)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_matches_the_definition(
    name: KernelsName,
    num_rows: int,
    num_experts: int,
    top_k: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weights = make_experts(num_experts, *sizes, dtype)
    ids, row_weights = choose(num_rows, num_experts, top_k)
    x = torch.randn(num_rows, sizes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    out = make_kernels(name, dtype).experts(weights)(x, ids, row_weights)
    triples = [(w.gate, w.up, w.down) for w in weights]
    expected = routed_experts_reference(x, ids, row_weights, triples)
    error = ((out - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{name}, {num_rows=}, {num_experts=}, {top_k=}, {sizes=}, {error=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("sizes", [(48, 96), (50, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_in_company(
    name: KernelsName, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    bank = make_kernels(name, dtype).experts(make_experts(8, *sizes, dtype))
    ids, weights = choose(600, 8, 2)
    x = torch.randn(600, sizes[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    together = bank(x, ids, weights)
    for first, last in ((0, 1), (17, 18), (3, 8), (100, 163), (599, 600), (0, 599)):
        part = slice(first, last)
        alone = bank(x[part], ids[part], weights[part])
        assert torch.equal(alone, together[part]), f"{name}, {dtype=}, {part=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_an_expert_that_no_row_chose_may_be_absent(name: KernelsName) -> None:
    kernels = make_kernels(name, torch.float32)
    experts = make_experts(4, 16, 16, torch.float32)
    ids, weights = torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
    x = torch.randn(1, 16)
    full = kernels.experts(experts)(x, ids, weights)
    some = kernels.experts([experts[0], None, None, experts[3]])
    assert torch.equal(some(x, ids, weights), full)
    with pytest.raises(AssertionError, match="expert 3, which is not here"):
        kernels.experts([experts[0], None, None, None])(x, ids, weights)


def test_combine_adds_in_ascending_order() -> None:
    # In fp32, 1e8 + 1 is 1e8: the order shows.
    ones = torch.ones(1, 3)
    assert combine_choices(torch.tensor([[[1e8], [1.0], [-1e8]]]), ones).item() == 0.0
    assert combine_choices(torch.tensor([[[1e8], [-1e8], [1.0]]]), ones).item() == 1.0
