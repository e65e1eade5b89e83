"""Quantised matrices of a checkpoint in the layouts that the kernels read.

    N outputs of a part, R rows of all parts, K inputs, G groups of inputs

Nothing is rounded: codes, zeros and scales are the checkpoint's. Scales that more rows or inputs
share than a layout has room for are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.gpu.grouped_gemm.heuristics import FP8_BLOCK, WeightFormat
from moe_kernels.gpu.grouped_gemm.pack import (
    INT_GROUPS,
    MXFP4_GROUP,
    GroupedWeight,
    int4_from_codes,
    int8_from_codes,
    mxfp4_from_codes,
    plain,
    with_block_scales,
    with_row_scales,
)
from moe_kernels.interface.quantised_matrix import MatrixForm, PackedLayout, QuantisedMatrix, Weight

_SYMMETRIC_ZERO = 8  # of int4
_INT8_OFFSET = 128
_INFINITE_EXPONENT = 241  # larger mxfp4 scales, and NaN, become infinity in the kernels


def layout_of(form: MatrixForm) -> PackedLayout | str:
    """Returns the layout of matrices of this form, or the reason why the form is not supported."""
    if form.is_shuffled:
        return "their groups are shuffled (activation order)"
    if form.values == "e2m1":
        if form.group != MXFP4_GROUP or form.has_zeros or form.scales != "e8m0":
            return f"{form.name} are not mxfp4"
        return _layout("mxfp4", form)
    if form.values == "e4m3":
        return _fp8_layout(form)
    if form.values == "int8" and not form.group and not form.has_zeros:
        return _layout("int8", form)
    if _group(form) == 0:
        return f"{form.name} are not a multiple of {INT_GROUPS[-1]}"
    spread = replace(form, group=_group(form), block_rows=1)
    if form.values == "int8":
        return _layout("int8_zero", replace(spread, has_zeros=True))
    return _layout("int4_zero" if form.has_zeros else "int4", spread)


def _fp8_layout(form: MatrixForm) -> PackedLayout | str:
    if not form.group:
        return _layout("fp8_channel", form)
    if form.block_rows % FP8_BLOCK or form.group % FP8_BLOCK:
        return f"{form.name} are not blocks of {FP8_BLOCK}x{FP8_BLOCK}"
    spread = replace(form, group=FP8_BLOCK, block_rows=FP8_BLOCK, scales="float32")
    return _layout("fp8_block", spread)


def _layout(name: WeightFormat, form: MatrixForm) -> PackedLayout:
    return PackedLayout(name, form.bits)


def _group(form: MatrixForm) -> int:
    """Returns the largest group of the kernels that divides the form's, or 0."""
    return next((group for group in INT_GROUPS if form.group % group == 0), 0)


def grouped_weight(parts: Sequence[Weight]) -> GroupedWeight:
    """Joins one expert's gate and up, or takes its down alone. All are tensors, or all have one
    form."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    matrices = [part for part in parts if isinstance(part, QuantisedMatrix)]
    if tensors:
        assert not matrices, "gate and up are both packed or both floats"
        return plain(torch.cat(tensors)[None], len(parts))
    form = matrices[0].form
    assert all(matrix.form == form for matrix in matrices), "gate and up are of one form"
    layout = layout_of(form)
    assert isinstance(layout, PackedLayout), f"{form.name}: {layout}"
    codes_RK = torch.cat([_codes(matrix) for matrix in matrices])
    if layout.name == "fp8_block":
        scales_Pnc = torch.stack([_block_scales(matrix) for matrix in matrices])
        return with_block_scales(codes_RK.view(torch.float8_e4m3fn)[None], scales_Pnc[None])
    if layout.name == "mxfp4":
        exponents_RG = torch.cat([matrix.scales_NG for matrix in matrices])
        exponents_RG = exponents_RG.clamp(max=_INFINITE_EXPONENT)
        return mxfp4_from_codes(codes_RK[None], exponents_RG[None], len(parts))
    scales_RG = torch.cat([_row_scales(matrix) for matrix in matrices])
    if layout.name in ("int8", "fp8_channel"):
        is_int8 = layout.name == "int8"
        values_RK = codes_RK ^ _INT8_OFFSET if is_int8 else codes_RK
        dtype = torch.int8 if is_int8 else torch.float8_e4m3fn
        return with_row_scales(values_RK.view(dtype)[None], scales_RG[None, :, 0], len(parts))
    if layout.name == "int4":
        return int4_from_codes(codes_RK[None], scales_RG[None], None, _group(form), len(parts))
    zeros_RG = torch.cat([_zeros(matrix) for matrix in matrices])
    made = int4_from_codes if layout.name == "int4_zero" else int8_from_codes
    return made(codes_RK[None], scales_RG[None], zeros_RG[None], _group(form), len(parts))


def joined(experts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Returns all experts of a layer. Zeros that are all in the middle of the codes are left
    out."""
    first = experts[0]
    weight = replace(
        first,
        values=torch.cat([expert.values for expert in experts]),
        scales=_joined([expert.scales for expert in experts]),
        zeros=_joined([expert.zeros for expert in experts]),
    )
    if weight.weight_format == "int4_zero" and _is_symmetric(weight):
        return replace(weight, weight_format="int4", zeros=None)
    return weight


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    assert len(there) in (0, len(parts)), "experts of one layout"
    return torch.cat(there) if there else None


def _is_symmetric(weight: GroupedWeight) -> bool:
    """Groups that are padding have zeros of 0 and scales of 0."""
    assert weight.scales is not None and weight.zeros is not None, "int4_zero has both"
    return bool(((weight.zeros == _SYMMETRIC_ZERO) | (weight.scales == 0)).all())


def _codes(matrix: QuantisedMatrix) -> Tensor:
    """[N, K] uint8. Of signed numbers with an offset of half their range, as the layouts' own."""
    return matrix.table.codes(matrix.bytes_NB)[:, : matrix.num_columns]


def _zeros(matrix: QuantisedMatrix) -> Tensor:
    """Returns the codes [N, G] of the zeros, by the groups of the layout."""
    offset = torch.tensor([[matrix.table.offset]], device=matrix.bytes_NB.device)
    zeros_NG = offset if matrix.zeros_NG is None else matrix.zeros_NG + offset
    return _spread(zeros_NG.to(torch.uint8), matrix)


def _row_scales(matrix: QuantisedMatrix) -> Tensor:
    """[N, G], by the groups of the layout; [N, 1] where all inputs share one."""
    form = matrix.form
    if form.values == "e4m3" or (not form.group and form.values == "int8" and not form.has_zeros):
        return matrix.scales_NG.expand(len(matrix.bytes_NB), -1)
    return _spread(matrix.scales_NG, matrix)


def _spread(values_NG: Tensor, matrix: QuantisedMatrix) -> Tensor:
    """Converts the form's groups, or one group for all, to those of the layout."""
    group = _group(matrix.form)
    num_groups = -(-matrix.num_columns // group)
    times = matrix.form.group // group if values_NG.shape[1] > 1 else num_groups
    values_NG = values_NG.expand(len(matrix.bytes_NB), -1)
    return values_NG.repeat_interleave(times, dim=1)[:, :num_groups]


def _block_scales(matrix: QuantisedMatrix) -> Tensor:
    """[ceil(N / 128), ceil(K / 128)] fp32 from the scales of each row."""
    scales_NG = matrix.float_scales()
    times = matrix.form.group // FP8_BLOCK
    blocks_nG = scales_NG[::FP8_BLOCK]
    rows = blocks_nG.repeat_interleave(FP8_BLOCK, dim=0)[: len(scales_NG)]
    assert torch.equal(rows, scales_NG), "the matrix begins within a block"
    return blocks_nG.repeat_interleave(times, dim=1)[:, : -(-matrix.num_columns // FP8_BLOCK)]
