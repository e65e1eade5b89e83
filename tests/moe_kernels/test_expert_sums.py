"""The weighted sum of experts has the same bits in any order, on any number of banks."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.interface.kernels import ExpertBank, ExpertWeights, GatedActivation
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.expert_mlp import combine_choices, routed_experts_reference
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels

NUM_EXPERTS, WIDTH, EXPERT_WIDTH = 7, 45, 24  # off every vector
SEEDS = st.integers(0, 20)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@functools.cache
def expert(index: int, dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(index)

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    return ExpertWeights(
        weight(EXPERT_WIDTH, WIDTH), weight(EXPERT_WIDTH, WIDTH), weight(WIDTH, EXPERT_WIDTH)
    )


@functools.cache
def bank_of(name: KernelsName, dtype: torch.dtype, held: frozenset[int]) -> ExpertBank:
    experts = [expert(e, dtype) if e in held else None for e in range(NUM_EXPERTS)]
    return make_kernels(name, dtype).experts(experts, GatedActivation())


@functools.cache
def rows(num_rows: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, ascending ids, and weights of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_rows, WIDTH, generator=generator)
    ids_TK = (
        torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(top_k).indices.sort().values
    )
    weights_TK = torch.randn(num_rows, top_k, generator=generator).exp()
    return x_TD, ids_TK, weights_TK


def elsewhere(ids_TK: Tensor, held: frozenset[int]) -> Tensor:
    """Replaces choices that are not held by -1."""
    is_here = torch.tensor([e in held for e in range(NUM_EXPERTS)])[ids_TK]
    return torch.where(is_here, ids_TK, -1)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_placement_changes_no_bit(
    name: KernelsName, dtype: torch.dtype, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 5), label="ranks")
    rank_of = data.draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
    )
    order = data.draw(st.permutations(range(num_ranks)), label="order")
    x_TD, ids_TK, weights_TK = rows(
        data.draw(st.integers(1, 9)), data.draw(st.integers(1, NUM_EXPERTS)), data.draw(SEEDS)
    )
    x_TD = x_TD.to(dtype)
    whole_bank = bank_of(name, dtype, frozenset(range(NUM_EXPERTS)))
    whole_TD = whole_bank(x_TD, ids_TK, weights_TK)
    total_TD = torch.zeros(len(x_TD), WIDTH, dtype=torch.float64)
    for rank in order:
        held = frozenset(e for e in range(NUM_EXPERTS) if rank_of[e] == rank)
        if held:
            bank = bank_of(name, dtype, held)
            total_TD += bank.partial(x_TD, elsewhere(ids_TK, held), weights_TK)
    assert whole_TD.dtype == torch.float32, f"{name} gives {whole_TD.dtype}"
    assert torch.equal(total_TD.float(), whole_TD), f"{name}, {dtype}: {rank_of} in order {order}"
    assert torch.equal(total_TD, whole_bank.partial(x_TD, ids_TK, weights_TK)), f"{name}: {rank_of}"
    weights = [expert(e, dtype) for e in range(NUM_EXPERTS)]
    want_TD = routed_experts_reference(x_TD, ids_TK, weights_TK, weights)
    error = ((total_TD - want_TD).abs().max() / want_TD.abs().max()).item()
    assert error < TOLERANCES[dtype], f"{name}, {dtype}: {error=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_a_choice_here_are_zero(name: KernelsName, dtype: torch.dtype) -> None:
    held = frozenset({2})
    bank = bank_of(name, dtype, held)
    x_TD, _, weights_TK = rows(4, 2, 0)
    weights_TK[1] = torch.nan  # of choices that live elsewhere: never looked at
    ids_TK = torch.tensor([[2, 3], [0, 6], [0, 2], [1, 3]])
    out_TD = bank.partial(x_TD.to(dtype), elsewhere(ids_TK, held), weights_TK)
    assert out_TD.dtype == torch.float64, f"{name} gives {out_TD.dtype}"
    assert not out_TD[1].any() and not out_TD[3].any(), f"{name}: {out_TD}"
    assert out_TD[0].any() and out_TD[2].any(), f"{name}: {out_TD}"
    none_TK = torch.full((3, 2), -1)
    nothing_TD = bank(x_TD[:3].to(dtype), none_TK, weights_TK[:3])
    assert not nothing_TD.any() and nothing_TD.shape == (3, WIDTH), f"{name}: {nothing_TD}"
    assert bank.partial(x_TD[:0].to(dtype), none_TK[:0], weights_TK[:0]).shape == (0, WIDTH), name


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_terms_lie_on_the_grid(name: KernelsName) -> None:
    x_TD, ids_TK, weights_TK = rows(9, 3, 1)
    bank = bank_of(name, torch.float32, frozenset(range(NUM_EXPERTS)))
    steps_TD = bank.partial(x_TD, ids_TK, weights_TK) * 2.0**36
    assert torch.equal(steps_TD, steps_TD.round()), f"{name}: off the grid of 2^-36"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_reach_the_sum(name: KernelsName, bad: float) -> None:
    """They reach the sum of their own row only, in either half of its choices."""
    x_TD, ids_TK, weights_TK = (t.clone() for t in rows(5, 3, 2))
    bank = bank_of(name, torch.float32, frozenset(range(NUM_EXPERTS)))
    good_TD = bank(x_TD, ids_TK, weights_TK)
    for k in range(3):
        bad_TK = weights_TK.clone()
        bad_TK[2, k] = bad
        out_TD = bank(x_TD, ids_TK, bad_TK)
        assert not out_TD[2].isfinite().any(), f"{name}, choice {k}: {out_TD[2]}"
        others = [0, 1, 3, 4]
        assert torch.equal(out_TD[others], good_TD[others]), f"{name}: neighbours of row 2 changed"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("width", [1, 15, 32, 33, 64, 100])
def test_every_column_of_every_width(name: KernelsName, width: int) -> None:
    """Experts return x times a power of two, so the sum is exact and known."""
    eye = torch.eye(width)
    weights = [ExpertWeights(60 * eye, eye, 2.0**-e / 60 * eye) for e in range(4)]
    bank = make_kernels(name, torch.float32).experts(weights, GatedActivation())
    x_TD = torch.ones(3, width)
    ids_TK, weights_TK = torch.tensor([[0, 1], [-1, 3], [2, -1]]), torch.full((3, 2), 0.5)
    want_TD = torch.tensor([[0.75], [0.0625], [0.125]]).expand(3, width)
    torch.testing.assert_close(bank(x_TD, ids_TK, weights_TK), want_TD, rtol=1e-6, atol=0)


def test_the_order_of_terms_does_not_matter() -> None:
    # In fp32 1e8 + 1 is 1e8; here even the sums that fp32 cannot hold keep what is added to them.
    ones = torch.ones(1, 3)
    for order in itertools.permutations([60000.0, 2.0**-30, -60000.0]):
        y_TKD = torch.tensor(order)[None, :, None]
        assert combine_choices(y_TKD, ones).item() == 2.0**-30, f"{order}"


def test_terms_round_to_the_nearest_even_step() -> None:
    step = 2.0**-36
    found = [
        combine_choices(torch.tensor([[[value * step]]]), torch.ones(1, 1)).item() / step
        for value in (0.5, 0.5 + 2**-20, 1.5, 2.5, -0.5, -1.5, 3.0)
    ]
    assert found == [0, 1, 2, 2, 0, -2, 3], f"{found}"
