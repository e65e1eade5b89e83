"""Quantised matrices in the kernels' layouts: the same weights, and their products."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.gpu.grouped_gemm.from_matrix import grouped_weight, joined, layout_of
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.interface.quantised_matrix import (
    E2M1,
    E4M3,
    OFFSET4,
    UINT4,
    MatrixForm,
    PackedLayout,
)
from moe_kernels.kernel_choice import choose_kernels
from moe_kernels.reference.torch_kernels import TorchKernels
from tests.support.kernels.kernel_sets import ids_of
from tests.support.kernels.quantised_matrices import KINDS, Kind, rounded_once

GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def id_of(kind: Kind) -> str:
    return kind.name


@pytest.mark.parametrize("num_columns", [256, 200, 96])
@pytest.mark.parametrize("kind", KINDS, ids=id_of)
def test_the_weights_are_those_of_the_matrices(kind: Kind, num_columns: int) -> None:
    """Two experts of two parts are equal bit for bit; both dimensions are ragged."""
    gates, ups = ([kind.matrix(136, num_columns, seed + e) for e in range(2)] for seed in (1, 8))
    weight = joined([grouped_weight(parts) for parts in zip(gates, ups, strict=True)])
    layout = layout_of(kind.form)
    assert isinstance(layout, PackedLayout) and layout.name == weight.weight_format, layout
    found_ERK = weight.dequantised()
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        want_RK = torch.cat((gate.dequantised(torch.float32), up.dequantised(torch.float32)))
        assert torch.equal(found_ERK[expert], want_RK), f"{kind.name}: expert {expert}"


@pytest.mark.parametrize("kind", KINDS, ids=id_of)
def test_what_is_said_of_the_bits_is_true(kind: Kind) -> None:
    """The matrix has no ragged edges and is so large that the scales of rows do not count."""
    num_rows, num_columns = 256, 4096
    weight = grouped_weight([kind.matrix(num_rows, num_columns)])
    tensors = (weight.values, weight.scales, weight.zeros)
    num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    layout = layout_of(kind.form)
    assert isinstance(layout, PackedLayout), layout
    bits = 8 * num_bytes / (num_rows * num_columns)
    assert abs(bits - layout.bits) < 0.01, f"{kind.name}: {bits} bits, {layout.bits} said"


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=id_of)
def test_a_bank_gives_the_sums_of_the_torch_set(
    kind: Kind, dtype: torch.dtype, device: torch.device
) -> None:
    """Down projections of some rows are floats, so both kinds are in one bank."""
    num_experts, width, expert_width = 2, 96, 64

    def expert(seed: int) -> ExpertWeights:
        gate, up, down = (
            rounded_once(kind.matrix(*shape, seed + i), dtype)
            for i, shape in enumerate([(expert_width, width)] * 2 + [(width, expert_width)])
        )
        return ExpertWeights(gate, up, down if kind.group else down.dequantised(dtype))

    experts = [expert(10 * e) for e in range(num_experts)]
    ids_TK = ids_of(4, 1, num_experts, "any")
    x_TD = torch.randn(4, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    weights_TK = torch.rand(4, 1, generator=torch.Generator().manual_seed(3))
    want_TD = TorchKernels().experts(experts, GPT_OSS)(x_TD, ids_TK, weights_TK)
    there = [
        ExpertWeights(*(w.to(device) for w in (e.gate, e.up, e.down))) for e in experts
    ]  # fmt: skip
    bank = choose_kernels(device, dtype, "triton").experts(there, GPT_OSS)
    found_TD = bank(*(t.to(device) for t in (x_TD, ids_TK, weights_TK))).cpu()
    error = ((found_TD - want_TD).abs().max() / want_TD.abs().max()).item()
    assert error < TOLERANCES[dtype], f"{kind.name}, {dtype}: {error:.2e}"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Kind(name="", table=UINT4, group=64, is_shuffled=True).form, "activation order"),
        (Kind(name="", table=OFFSET4, group=48).form, "int4 groups of 48 are not a multiple of 32"),
        (Kind(name="", table=E4M3, group=64, block_rows=64).form, "blocks of 64x64 are not blocks"),
        (Kind(name="", table=E2M1, group=16).form, "e2m1 groups of 16 are not mxfp4"),
    ],
    ids=str,
)
def test_what_no_layout_holds(form: MatrixForm, reason: str) -> None:
    layout = layout_of(form)
    assert isinstance(layout, str) and reason in layout, layout


def test_zeros_in_the_middle_are_left_out() -> None:
    """Symmetric GPTQ stores the zero 8 everywhere. If one zero differs, all are kept."""
    kind = Kind(name="", table=UINT4, group=32, has_zeros=True)
    experts = [kind.matrix(8, 96, seed) for seed in range(2)]
    for matrix in experts:
        assert matrix.zeros_NG is not None, "it has zeros"
        matrix.zeros_NG.fill_(8)
    weight = joined([grouped_weight([matrix]) for matrix in experts])
    assert (weight.weight_format, weight.zeros) == ("int4", None), weight.weight_format
    assert torch.equal(weight.dequantised()[1], experts[1].dequantised(torch.float32))
    experts[0].zeros_NG[3, 1] = 7  # type: ignore[index]
    weight = joined([grouped_weight([matrix]) for matrix in experts])
    assert weight.weight_format == "int4_zero", weight.weight_format
    assert torch.equal(weight.dequantised()[0], experts[0].dequantised(torch.float32))


def test_scales_that_are_no_numbers_show() -> None:
    """An exponent of 255 is NaN; the kernels have no NaN scale and read infinity."""
    matrix = Kind(name="", table=E2M1, group=32, scale_dtype=torch.uint8).matrix(2, 32)
    matrix.scales_NG[0] = 255
    matrix.bytes_NB[:] = 0x22
    assert grouped_weight([matrix]).scales.tolist() == [[[241, 0], [int(matrix.scales_NG[1]), 0]]]  # type: ignore[union-attr]
