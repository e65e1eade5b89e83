"""Matrices that the native kernels keep in few bits: exact products and products of whole numbers.

N outputs, K inputs, T rows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation, Kernels
from moe_kernels.interface.quantised_matrix import (
    LowBitProducts,
    QuantisedMatrix,
    joined_rows,
    selected_rows,
)
from moe_kernels.kernel_choice import choose_kernels
from moe_kernels.reference.torch_kernels import TorchKernels
from tests.support.kernels.kernel_sets import KERNEL_SETS
from tests.support.kernels.quantised_matrices import KINDS, Kind, rounded_once

pytestmark = list(KERNEL_SETS[1].marks)  # the native kernels

FLOATS = (torch.float32, torch.bfloat16)
ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = [kind for kind in KINDS if kind.form.can_quantise_rows]


def native(dtype: torch.dtype, products: LowBitProducts = "exact") -> Kernels:
    return choose_kernels(torch.device("cpu"), dtype, "native", 2, products)


def rows_of(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def expert_of(kind: Kind, d: int, f: int, seed: int) -> ExpertWeights:
    shapes = ((f, d), (f, d), (d, f))
    return ExpertWeights(*(kind.matrix(*s, seed=3 * seed + i) for i, s in enumerate(shapes)))


def in_floats(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    matrices = (weights.gate, weights.up, weights.down)
    return ExpertWeights(*(m.dequantised(dtype) for m in matrices))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_exact_products_are_those_of_the_dequantised_matrix(kind: Kind, dtype: torch.dtype) -> None:
    """Panels, eights and groups are ragged; few rows are unpacked in registers, many in blocks."""
    kernels = native(dtype)
    for index, (n, k) in enumerate(((64, 128), (40, 264), (200, 1000), (17, 9))):
        matrix = rounded_once(kind.matrix(n, k, seed=index), ROUNDINGS[index % 3])
        packed, floats = kernels.linear(matrix), kernels.linear(matrix.dequantised(dtype))
        for num_rows in (1, 2, 3, 4, 5, 7, 30):
            x_TK = rows_of(num_rows, k, dtype)
            found, wanted = packed(x_TK), floats(x_TK)
            assert torch.equal(found, wanted), f"{n} x {k}, {num_rows} rows"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_exact_products_with_scales_of_any_size(kind: Kind) -> None:
    """Negative, zero, huge, tiny and infinite scales come among usual ones, with every code."""
    kernels, generator = native(torch.bfloat16), torch.Generator().manual_seed(2)
    matrix = kind.matrix(192, 512, seed=5)
    assert matrix.bytes_NB.unique().numel() > 100, "every code of 4 bits, and most of 8"
    scales_NG = matrix.scales_NG.expand(192, -1).clone()
    if kind.form.scales == "e8m0":
        codes = torch.tensor([0, 1, 20, 27, 227, 228, 250, 254], dtype=torch.uint8)
    else:
        largest = torch.finfo(kind.scale_dtype).max
        codes = torch.tensor([-0.25, 0.0, largest, -largest / 8, torch.inf, 1e-38, 1e-30, 2e-7])
    rows = torch.randperm(128, generator=generator)[:40]  # the columns behind 128 stay usual
    scales_NG[rows] = codes[torch.randint(8, (40, 1), generator=generator)].to(scales_NG.dtype)
    form = replace(matrix.form, block_rows=1)
    matrix = rounded_once(replace(matrix, scales_NG=scales_NG, form=form), torch.bfloat16)
    packed, floats = kernels.linear(matrix), kernels.linear(matrix.dequantised(torch.bfloat16))
    for num_rows in (1, 3, 6):
        x_TK = rows_of(num_rows, 512, torch.bfloat16)
        found, wanted = packed(x_TK), floats(x_TK)
        assert torch.equal(found.isnan(), wanted.isnan()), f"{num_rows} rows"
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num()), f"{num_rows} rows"
        assert wanted[:, 128:].isfinite().all(), "usual scales"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_exact_experts(kind: Kind) -> None:
    """The experts are in a bank, and in slots that are overwritten."""
    kernels, activation = native(torch.bfloat16), GatedActivation()
    weights = [expert_of(kind, 72, 48, seed) for seed in range(4)]
    floats = kernels.experts([in_floats(w, torch.bfloat16) for w in weights], activation)
    packed = kernels.experts(weights, activation)
    slots = kernels.expert_slots(weights[0], activation, 2**30, 4)
    moving = slots.bank(4)
    for expert in (0, 1, 2, 3):
        slots.write(3 - expert, weights[0])
        slots.write(3 - expert, weights[expert])
        moving.point(expert, 3 - expert)
    for num_rows in (1, 4, 60):
        x_TD, weights_TK = rows_of(num_rows, 72, torch.bfloat16), torch.rand(num_rows, 2)
        ids_TK = torch.rand(num_rows, 4).topk(2).indices.sort().values
        wanted = floats(x_TD, ids_TK, weights_TK)
        for bank in (packed, moving):
            assert torch.equal(bank(x_TD, ids_TK, weights_TK), wanted), f"{num_rows} rows"
        assert torch.equal(moving.partial(x_TD, ids_TK, weights_TK).float(), wanted)


def test_a_packed_expert_is_as_small_as_stored() -> None:
    kernels, weights = native(torch.bfloat16), expert_of(KINDS[7], 256, 128, 0)
    slots = kernels.expert_slots(weights, GatedActivation(), 2**30, 1)
    assert slots.slot_bytes == weights.num_bytes == 3 * 256 * 128 * 4.5 / 8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS), rows=st.integers(1, 40), hidden=st.integers(2, 6),
    data=st.data(), products=st.sampled_from(["exact", "int8"]),
)  # fmt: skip
def test_columns_may_be_shared_out(
    kind: Kind, rows: int, hidden: int, data: st.DataObject, products: LowBitProducts
) -> None:
    """A layer's outputs are computed in two parts, and an MLP in halves of some columns each."""
    kernels, width = native(torch.bfloat16, products), 96
    matrix, x_TK = kind.matrix(130, width), rows_of(rows, width, torch.bfloat16)
    end = data.draw(st.integers(1, 129))
    whole = kernels.linear(matrix)(x_TK)
    parts = [kernels.linear(selected_rows(matrix, slice(*ends))) for ends in ((0, end), (end, 130))]
    assert torch.equal(torch.cat([part(x_TK) for part in parts], 1), whole), f"column {end}"
    weights, weights_T1 = expert_of(kind, width, 32 * hidden, 1), torch.rand(rows, 1)
    bank = kernels.experts([weights], GatedActivation())
    wanted = bank(x_TK, torch.zeros(rows, 1, dtype=torch.int64), weights_T1)
    cut = data.draw(st.integers(1, min(width, 32 * hidden) - 1))
    matrices = (weights.gate, weights.up, weights.down)
    halves = [
        kernels.split_mlp(
            ExpertWeights(*(selected_rows(matrix, part) for matrix in matrices)),
            GatedActivation(),
        )
        for part in (slice(0, cut), slice(cut, None))
    ]
    hidden_TF = torch.cat([half.hidden(x_TK) for half in halves], 1)
    found = torch.cat([half.output(hidden_TF, weights_T1) for half in halves], 1)
    assert torch.equal(found, wanted), f"cut at {cut}"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.name)
def test_whole_numbers_have_the_bits_of_the_reference(kind: Kind, dtype: torch.dtype) -> None:
    """The bits of a row do not depend on the number of rows or on its neighbours. Groups hold
    zeros, the largest or the smallest numbers, or one that is not finite."""
    kernels, reference = native(dtype, "int8"), TorchKernels(low_bit_products="int8")
    for n, k in ((64, 128), (40, 256), (17, 96), (100, 768)):
        matrix, x_TK = kind.matrix(n, k), rows_of(31, k, dtype)
        x_TK[0, :32], x_TK[1, 32:64], x_TK[2, :32] = 0.0, 1e-38, 3e38
        x_TK[3, 40], x_TK[4, 41] = torch.inf, torch.nan
        layer, wanted = kernels.linear(matrix), reference.linear(matrix)(x_TK)
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 31):
            found = layer(x_TK[:num_rows].contiguous())
            equal = (found == wanted[:num_rows]) | (found.isnan() & wanted[:num_rows].isnan())
            assert equal.all(), f"{n} x {k}, {num_rows} rows: {(~equal).sum()} values differ"
        assert wanted[3:5].isnan().all() and wanted[5:].isfinite().all(), "groups that are not"


def test_whole_numbers_are_close_to_exact_products() -> None:
    for kind in WHOLE:
        matrix, x_TK = kind.matrix(64, 256), rows_of(9, 256, torch.float32)
        exact, whole = (native(torch.float32, p).linear(matrix)(x_TK) for p in ("exact", "int8"))  # type: ignore[arg-type]
        error = (exact - whole).norm() / exact.norm()
        assert 0 < error < 0.02, f"{kind.name}: {error}"


def test_rows_of_several_matrices_become_one() -> None:
    for kind in (KINDS[0], KINDS[6], KINDS[10], KINDS[17]):
        parts = [kind.matrix(128, 256, seed=seed) for seed in range(3)]
        joined = joined_rows(parts)
        assert isinstance(joined, QuantisedMatrix)
        wanted = torch.cat([part.dequantised(torch.float32) for part in parts])
        assert torch.equal(joined.dequantised(torch.float32), wanted), kind.name
