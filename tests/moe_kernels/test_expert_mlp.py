"""The expert stage by hand, against its float64 definition, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.expert_mlp import routed_experts_reference
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

SWIGLU = GatedActivation()
GPT_OSS = GatedActivation(alpha=1.702, limit=1.0, up_offset=1.0)  # a limit that is reached


def make_experts(
    num: int, width: int, hidden: int, dtype: torch.dtype, has_bias: bool = False
) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(num * width)

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    def biases() -> list[Tensor]:
        if not has_bias:
            return []
        return [torch.randn(n, generator=generator).to(dtype) for n in (hidden, hidden, width)]

    return [
        ExpertWeights(
            weight(hidden, width), weight(hidden, width), weight(width, hidden), *biases()
        )
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
        [ExpertWeights(20 * eye, eye, (i + 1) / 20 * eye) for i in range(3)], SWIGLU
    )
    ids, weights = torch.tensor([[0, 2], [1, 2]]), torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    out = bank(torch.ones(2, 4), ids, weights)
    # Row 0: 0.5 * 1 + 0.5 * 3 = 2. Row 1: 0.25 * 2 + 0.75 * 3 = 2.75.
    assert torch.allclose(out, torch.tensor([[2.0] * 4, [2.75] * 4]), atol=1e-5), out


CASES = [(1, 8, 2), (2, 8, 8), (5, 8, 1), (64, 32, 4), (300, 8, 2)]


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), CASES)
@pytest.mark.parametrize("sizes", [(48, 40), (64, 96), (50, 37)])
@pytest.mark.parametrize(("activation", "has_bias"), [(SWIGLU, False), (GPT_OSS, True)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_matches_the_definition(
    name: KernelsName,
    num_rows: int,
    num_experts: int,
    top_k: int,
    sizes: tuple[int, int],
    activation: GatedActivation,
    has_bias: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    weights = make_experts(num_experts, *sizes, dtype, has_bias)
    ids, row_weights = choose(num_rows, num_experts, top_k)
    x = torch.randn(num_rows, sizes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    out = make_kernels(name, dtype).experts(weights, activation)(x, ids, row_weights)
    expected = routed_experts_reference(x, ids, row_weights, weights, activation)
    error = ((out - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{name}, {num_rows=}, {num_experts=}, {top_k=}, {sizes=}, {error=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("sizes", [(48, 96), (50, 37)])
@pytest.mark.parametrize(("activation", "has_bias"), [(SWIGLU, False), (GPT_OSS, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_in_company(
    name: KernelsName,
    sizes: tuple[int, int],
    activation: GatedActivation,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    experts = make_experts(8, *sizes, dtype, has_bias)
    bank = make_kernels(name, dtype).experts(experts, activation)
    ids, weights = choose(600, 8, 2)
    x = torch.randn(600, sizes[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    together = bank(x, ids, weights)
    for first, last in ((0, 1), (17, 18), (3, 8), (100, 163), (599, 600), (0, 599)):
        part = slice(first, last)
        alone = bank(x[part], ids[part], weights[part])
        assert torch.equal(alone, together[part]), f"{name}, {dtype=}, {part=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bank_of_one_expert_is_a_dense_layer(name: KernelsName, dtype: torch.dtype) -> None:
    bank = make_kernels(name, dtype).experts(make_experts(1, 64, 500, dtype), SWIGLU)
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    ids, ones = torch.zeros(300, 1, dtype=torch.int64), torch.ones(300, 1)
    together = bank(x, ids, ones)
    weights = make_experts(1, 64, 500, dtype)
    expected = routed_experts_reference(x, ids, ones, weights)
    error = ((together - expected).abs().max() / expected.abs().max()).item()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype], f"{name}, {error=}"
    for part in (slice(0, 1), slice(17, 18), slice(3, 8), slice(100, 299)):
        assert torch.equal(bank(x[part], ids[part], ones[part]), together[part]), f"{name}, {part}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 70])
def test_a_bank_of_one_expert_has_the_bits_of_a_bank_of_many(
    name: KernelsName, dtype: torch.dtype, num_rows: int
) -> None:
    kernels, experts = make_kernels(name, dtype), make_experts(2, 1100, 40, dtype, has_bias=True)
    one, two = (kernels.experts(some, SWIGLU) for some in (experts[1:], experts))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_rows, 1100, generator=generator).to(dtype)
    ids = torch.zeros(num_rows, 1, dtype=torch.int64)
    weights = torch.rand(num_rows, 1, generator=generator)
    assert torch.equal(one.partial(x, ids, weights), two.partial(x, ids + 1, weights))
    ids[::2] = -1  # some rows have theirs elsewhere
    some = torch.where(ids < 0, ids, 1)
    assert torch.equal(one.partial(x, ids, weights), two.partial(x, some, weights))


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_an_expert_that_no_row_chose_may_be_absent(name: KernelsName) -> None:
    kernels = make_kernels(name, torch.float32)
    experts = make_experts(4, 16, 16, torch.float32)
    ids, weights = torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
    x = torch.randn(1, 16)
    full = kernels.experts(experts, SWIGLU)(x, ids, weights)
    some = kernels.experts([experts[0], None, None, experts[3]], SWIGLU)
    assert torch.equal(some(x, ids, weights), full)
    with pytest.raises(AssertionError, match="expert 3, which this rank does not hold"):
        kernels.experts([experts[0], None, None, None], SWIGLU)(x, ids, weights)
