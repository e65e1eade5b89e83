"""Additions of one bit per weight: the values of dense matrices, in rows that do not depend on each
other, with the base's weights shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.interface.adapters import AddingBank, RowAdditions
from moe_kernels.interface.kernels import ExpertBank, ExpertWeights, GatedActivation
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix, signs_of
from moe_kernels.interface.signed_kernels import SignedBank, SignedKernels
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.expert_mlp import routed_experts_reference
from tests.support.kernels.kernel_sets import KERNEL_SETS, ids_of, make_kernels
from tests.support.kernels.signs import random, signed

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def test_bits_are_the_signs() -> None:
    delta = torch.tensor([[0.5, -1.0, 0.0, 2.0, -3.0, 1.0, 1.0, 1.0, -1.0]])
    matrix = SignMatrix(bits_NB=signs_of(delta), num_columns=9, scales_N=torch.tensor([0.5]))
    assert matrix.bits_NB.tolist() == [[0b11101101, 0]]
    assert matrix.dense().tolist() == [[0.5, -0.5, 0.5, 0.5, -0.5, 0.5, 0.5, 0.5, -0.5]]


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "width"), [(8, 24), (100, 33), (192, 256)])
def test_a_linear_layer(
    kernels: KernelsName, dtype: torch.dtype, num_outputs: int, width: int
) -> None:
    made = make_kernels(kernels, dtype)
    assert isinstance(made, SignedKernels)
    weight = (random(num_outputs, width) / width**0.5).to(dtype)
    x, residual = random(7, width, seed=1).to(dtype), random(7, num_outputs, seed=2).to(dtype)
    for by_row in (False, True):
        added = signed(num_outputs, width, 3, by_row=by_row)
        linear = made.signed_linear(made.linear(weight.clone()), added)
        out = linear(x, residual)
        whole = x.double() @ (weight.double() + added.dense().double()).T + residual.double()
        if added.bias_N is not None:
            whole += added.bias_N
        assert torch.allclose(out.double(), whole, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        rows = [linear(x[i : i + 1], residual[i : i + 1]) for i in range(len(x))]
        assert torch.equal(torch.cat(rows), out), "a row depends on its batch"


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "hidden"), [(64, 48), (40, 24)])
def test_experts(kernels: KernelsName, dtype: torch.dtype, width: int, hidden: int) -> None:
    made, activation = make_kernels(kernels, dtype), GatedActivation()
    assert isinstance(made, SignedKernels)
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    experts = [
        ExpertWeights(
            *((random(*s, seed=9 * e + i) / s[1] ** 0.5).to(dtype) for i, s in enumerate(shapes))
        )
        for e in range(6)
    ]
    added = [
        SignedExpert(
            gate=signed(hidden, width, 100 + e) if e % 2 else None,
            up=signed(hidden, width, 200 + e, by_row=e == 3),
            down=signed(width, hidden, 300 + e),
        )
        for e in range(6)
    ]
    base = made.experts(experts, activation)
    bank = SignedBank(base, made.expert_signs(dict(enumerate(added)), torch.ones(6).bool()))
    x, ids = random(9, width, seed=5).to(dtype), ids_of(9, 2, 6, "any")
    weights = torch.full((9, 2), 0.5)
    out = bank.partial(x, ids, weights)
    merged = [_merged(expert, each) for expert, each in zip(experts, added, strict=True)]
    whole = _reference(x, ids, weights, merged, added)
    assert torch.allclose(out, whole, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for row in range(9):
        own = slice(row, row + 1)
        assert torch.equal(bank.partial(x[own], ids[own], weights[own]), out[own])
    _check_rows_of_two_adapters(made, base, bank.signs, added, (x, ids, weights))


def _check_rows_of_two_adapters(
    made: SignedKernels,
    base: ExpertBank,
    signs: object,
    added: list[SignedExpert],
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Rows of both, of none, and experts that the second one leaves as they are."""
    assert isinstance(base, AddingBank)
    is_changed = torch.tensor([True, True, False, False, True, True])
    other = made.expert_signs({e: added[e - 1] for e in (0, 1, 4, 5)}, is_changed)
    index = np.array([0, 1, -1, 1, 0, -1, 1, 1, 0])
    mixed = base.added_partial(*rows, RowAdditions(index, [signs, other]))
    alone = [SignedBank(base, signs).partial(*rows), SignedBank(base, other).partial(*rows)]
    alone.append(base.partial(*rows))
    for row, owner in enumerate(index):
        assert torch.equal(mixed[row], alone[owner][row]), f"row {row} of adapter {owner}"


def _merged(expert: ExpertWeights, added: SignedExpert) -> ExpertWeights:
    parts = ((expert.gate, added.gate), (expert.up, added.up), (expert.down, added.down))
    floats = []
    for weight, more in parts:
        assert isinstance(weight, Tensor)
        floats.append(weight.double() + (0.0 if more is None else more.dense().double()))
    return ExpertWeights(*floats)


def _reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    merged: list[ExpertWeights],
    added: list[SignedExpert],
) -> Tensor:
    biased = []
    for expert, each in zip(merged, added, strict=True):
        up_bias = None if each.up is None else each.up.bias_N
        zeros = torch.zeros(len(expert.gate)), torch.zeros(len(expert.down))
        biased.append(
            ExpertWeights(
                expert.gate, expert.up, expert.down, zeros[0],
                zeros[0] if up_bias is None else up_bias, zeros[1],
            )
        )  # fmt: skip
    return routed_experts_reference(x, ids, weights, biased)
