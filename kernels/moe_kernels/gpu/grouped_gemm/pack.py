"""Expert weights in the layouts that the kernels read, and back.

    E experts, P parts (2 for gate and up, else 1), N outputs of a part, R = P * N rows, C inputs
    G groups of inputs, B bytes of a row; [R] is gate's N rows, then up's

| format        | values                   | scales                                | weight        |
|---------------|--------------------------|---------------------------------------|---------------|
| `plain`       | [E, R, C], model's dtype | none                                  | v             |
| `int8`        | [E, R, C] int8           | [E, R] fp32                           | v s           |
| `int8_zero`   | [E, R, C] uint8          | [E, R, G] float, zeros the same, uint8 | (v - zero) s |
| `fp8_channel` | [E, R, C] e4m3 bits      | [E, R] fp32                           | v s           |
| `fp8_block`   | [E, R, C] e4m3 bits      | [E, P, ceil(N/128), ceil(C/128)] fp32 | v s           |
| `int4`        | [E, R, B] two a byte     | [E, R, G] float                       | (v - 8) s     |
| `int4_zero`   | [E, R, B] two a byte     | [E, R, G] float, zeros the same, uint8 | (v - zero) s |
| `mxfp4`       | [E, R, B] two a byte     | [E, R, C/32] uint8 (e8m0, up to 240)  | v 2^(s - 127) |

Two a byte: inputs are cut into blocks of 2 H, H = min(group, 64); byte j of a block holds inputs j
(low four bits) and j + H (high), so both halves of a tile come out of one load in order, and lie in
one group each. C is padded to whole blocks, with scales of 0. Float: fp32, fp16 or bf16.

Where the scale has a whole row or block, the sums are of exact values and scaled in fp32; with
groups, (v - zero) s is rounded from fp32 to the model's dtype before it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.gpu.grouped_gemm.heuristics import (
    FP8_BLOCK,
    PACKED_FORMATS,
    WeightFormat,
    block_inputs,
)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_LARGEST = 448.0
MXFP4_GROUP = 32
INT_GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """The weights of one product of all experts, in the layout of the table above."""

    weight_format: WeightFormat
    values: Tensor
    num_inputs: int
    num_parts: int
    scales: Tensor | None = None
    zeros: Tensor | None = None
    group: int = 0

    @property
    def num_experts(self) -> int:
        return self.values.shape[0]

    @property
    def num_outputs(self) -> int:
        """Outputs of one part."""
        return self.values.shape[1] // self.num_parts

    def dequantised(self) -> Tensor:
        """[E, R, C] in fp32, before any rounding to the model's dtype."""
        if self.weight_format == "plain":
            return self.values.float()
        assert self.scales is not None, f"{self.weight_format} weights have scales"
        if self.weight_format in PACKED_FORMATS:
            return self._unpacked(self.scales)[:, :, : self.num_inputs]
        if self.weight_format == "int8":
            return self.values.float() * self.scales[:, :, None]
        if self.weight_format == "int8_zero":
            assert self.zeros is not None, "int8_zero weights have zeros"
            codes = self.values.float() - self._spread(self.zeros.float(), self.values)
            return codes * self._spread(self.scales.float(), self.values)
        values = self.values.view(torch.float8_e4m3fn).float()
        if self.weight_format == "fp8_channel":
            return values * self.scales[:, :, None]
        return values * _spread_blocks(self.scales, self.num_outputs, self.num_inputs)

    def _unpacked(self, scales: Tensor) -> Tensor:
        half = block_inputs(self.weight_format, self.group) // 2
        blocks = self.values.unflatten(2, (-1, half))
        codes = torch.cat((blocks & 15, blocks >> 4), dim=-1).flatten(2)
        if self.weight_format == "mxfp4":
            table = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), device=codes.device)
            values, factors = table[codes.long()], torch.exp2(scales.float() - 127.0)
        else:
            zeros = 8.0 if self.zeros is None else self._spread(self.zeros.float(), codes)
            values, factors = codes.float() - zeros, scales.float()
        return values * self._spread(factors, codes)

    def _spread(self, groups_ERG: Tensor, codes: Tensor) -> Tensor:
        return groups_ERG.repeat_interleave(self.group, dim=2)[:, :, : codes.shape[2]]


def plain(weight_ERC: Tensor, num_parts: int) -> GroupedWeight:
    """Weights as they are."""
    return GroupedWeight(
        weight_format="plain",
        values=weight_ERC.contiguous(),
        num_inputs=weight_ERC.shape[2],
        num_parts=num_parts,
    )


def with_row_scales(values_ERC: Tensor, scales_ER: Tensor, num_parts: int) -> GroupedWeight:
    """int8 or float8_e4m3fn values, and the scale of each row."""
    is_int8 = values_ERC.dtype == torch.int8
    return GroupedWeight(
        weight_format="int8" if is_int8 else "fp8_channel",
        values=(values_ERC if is_int8 else values_ERC.view(torch.uint8)).contiguous(),
        scales=scales_ER.float().contiguous(),
        num_inputs=values_ERC.shape[2],
        num_parts=num_parts,
    )


def with_block_scales(values_ERC: Tensor, scales_EPnc: Tensor) -> GroupedWeight:
    """float8_e4m3fn values, and the scale of each block of 128 x 128 in each part."""
    return GroupedWeight(
        weight_format="fp8_block",
        values=values_ERC.view(torch.uint8).contiguous(),
        scales=scales_EPnc.float().contiguous(),
        group=FP8_BLOCK,
        num_inputs=values_ERC.shape[2],
        num_parts=scales_EPnc.shape[1],
    )


def int4_from_codes(
    codes_ERC: Tensor, scales_ERG: Tensor, zeros_ERG: Tensor | None, group: int, num_parts: int
) -> GroupedWeight:
    """Codes 0 to 15 (uint8); without zeros the zero is 8."""
    assert group in INT_GROUPS, f"groups of {group} inputs: {INT_GROUPS} are known"
    weight_format: WeightFormat = "int4" if zeros_ERG is None else "int4_zero"
    values = _packed(codes_ERC, weight_format, group)
    num_groups = -(-2 * values.shape[2] // group)
    zeros = None if zeros_ERG is None else _padded(zeros_ERG.to(torch.uint8), num_groups)
    return GroupedWeight(
        weight_format=weight_format,
        values=values,
        scales=_padded(scales_ERG, num_groups),
        zeros=zeros,
        group=group,
        num_inputs=codes_ERC.shape[2],
        num_parts=num_parts,
    )


def int8_from_codes(
    codes_ERC: Tensor, scales_ERG: Tensor, zeros_ERG: Tensor, group: int, num_parts: int
) -> GroupedWeight:
    """Codes and zeros 0 to 255 (uint8)."""
    assert group in INT_GROUPS, f"groups of {group} inputs: {INT_GROUPS} are known"
    return GroupedWeight(
        weight_format="int8_zero",
        values=codes_ERC.contiguous(),
        scales=scales_ERG.contiguous(),
        zeros=zeros_ERG.contiguous(),
        group=group,
        num_inputs=codes_ERC.shape[2],
        num_parts=num_parts,
    )


def mxfp4_from_codes(codes_ERC: Tensor, exponents_ERG: Tensor, num_parts: int) -> GroupedWeight:
    """E2M1 codes 0 to 15 and E8M0 exponents (both uint8)."""
    values = _packed(codes_ERC, "mxfp4", MXFP4_GROUP)
    return GroupedWeight(
        weight_format="mxfp4",
        values=values,
        scales=_padded(exponents_ERG, 2 * values.shape[2] // MXFP4_GROUP),
        group=MXFP4_GROUP,
        num_inputs=codes_ERC.shape[2],
        num_parts=num_parts,
    )


def quantised(
    weight_ERC: Tensor, weight_format: WeightFormat, group: int, num_parts: int
) -> GroupedWeight:
    """Floats rounded to a format, by the largest value of each scale's reach.

    Scales of groups of whole numbers are in the floats' dtype, as published checkpoints have them.
    """
    weight = weight_ERC.float()
    if weight_format == "plain":
        return plain(weight_ERC, num_parts)
    if weight_format == "fp8_block":
        return _quantised_blocks(weight, num_parts)
    if weight_format in ("int8", "fp8_channel"):
        largest = 127.0 if weight_format == "int8" else _E4M3_LARGEST
        scales = _scale(weight.abs().amax(dim=2), largest)
        values = weight / scales[:, :, None]
        if weight_format == "int8":
            return with_row_scales(values.round().to(torch.int8), scales, num_parts)
        return with_row_scales(values.to(torch.float8_e4m3fn), scales, num_parts)
    groups = _padded(weight, -(-weight.shape[2] // group) * group).unflatten(2, (-1, group))
    if weight_format == "mxfp4":
        return _quantised_mxfp4(groups, weight.shape[2], num_parts)
    if weight_format == "int8_zero":
        return _quantised_int8(groups, weight.shape[2], num_parts, weight_ERC.dtype)
    has_zero = weight_format == "int4_zero"
    return _quantised_int4(groups, weight.shape[2], has_zero, num_parts, weight_ERC.dtype)


def _quantised_blocks(weight_ERC: Tensor, num_parts: int) -> GroupedWeight:
    num_outputs, num_inputs = weight_ERC.shape[1] // num_parts, weight_ERC.shape[2]
    parts = weight_ERC.unflatten(1, (num_parts, num_outputs))
    padded = F.pad(parts, (0, -num_inputs % FP8_BLOCK, 0, -num_outputs % FP8_BLOCK))
    blocks = padded.unflatten(3, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    scales = _scale(blocks.abs().amax(dim=(3, 5)), _E4M3_LARGEST)
    values = weight_ERC / _spread_blocks(scales, num_outputs, num_inputs)
    return with_block_scales(values.to(torch.float8_e4m3fn), scales)


def _quantised_int4(
    groups_ERGc: Tensor,
    num_inputs: int,
    has_zero: bool,
    num_parts: int,
    scale_dtype: torch.dtype,
) -> GroupedWeight:
    zeros = None
    if has_zero:
        scales, zeros = _scales_and_zeros(groups_ERGc, 15.0, scale_dtype)
    else:
        scales = _scale(groups_ERGc.abs().amax(dim=3), 7.0).to(scale_dtype)
    codes = _codes(groups_ERGc, scales, 8.0 if zeros is None else zeros[..., None], 15)
    codes = codes[:, :, :num_inputs]
    return int4_from_codes(codes, scales, zeros, groups_ERGc.shape[3], num_parts)


def _quantised_int8(
    groups_ERGc: Tensor, num_inputs: int, num_parts: int, scale_dtype: torch.dtype
) -> GroupedWeight:
    scales, zeros = _scales_and_zeros(groups_ERGc, 255.0, scale_dtype)
    codes = _codes(groups_ERGc, scales, zeros[..., None], 255)[:, :, :num_inputs]
    return int8_from_codes(codes, scales, zeros.to(torch.uint8), groups_ERGc.shape[3], num_parts)


def _codes(
    groups_ERGc: Tensor, scales_ERG: Tensor, zero: float | Tensor, largest_code: int
) -> Tensor:
    """[E, R, C] uint8."""
    codes = (groups_ERGc / scales_ERG.float()[..., None]).round().add(zero)
    return codes.clamp(0, largest_code).to(torch.uint8).flatten(2)


def _scales_and_zeros(
    groups_ERGc: Tensor, largest_code: float, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[E, R, G], both as floats: codes from 0 on reach from the smallest to the largest value."""
    low, high = groups_ERGc.amin(dim=3).clamp(max=0), groups_ERGc.amax(dim=3).clamp(min=0)
    scales = _scale(high - low, largest_code).to(scale_dtype)
    return scales, (-low / scales.float()).round().clamp(0, largest_code)


def _quantised_mxfp4(groups_ERGc: Tensor, num_inputs: int, num_parts: int) -> GroupedWeight:
    """A group's exponent is its largest value's, less that of 4 (OCP MX v1.0, section 6.3)."""
    largest = groups_ERGc.abs().amax(dim=3).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)) - 2.0
    values = groups_ERGc / torch.exp2(exponents)[..., None]
    table = torch.tensor(_E2M1, device=values.device)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(values.abs(), between) + torch.where(values < 0, 8, 0)
    codes = codes.to(torch.uint8).flatten(2)[:, :, :num_inputs]
    return mxfp4_from_codes(codes, (exponents + 127.0).to(torch.uint8), num_parts)


def _packed(codes_ERC: Tensor, weight_format: WeightFormat, group: int) -> Tensor:
    block = block_inputs(weight_format, group)
    num_inputs = codes_ERC.shape[2]
    codes = F.pad(codes_ERC.to(torch.uint8), (0, -num_inputs % block))
    low, high = codes.unflatten(2, (-1, 2, block // 2)).unbind(3)
    return torch.bitwise_or(low, high << 4).flatten(2).contiguous()


def _padded(values_ERG: Tensor, num: int) -> Tensor:
    return F.pad(values_ERG, (0, num - values_ERG.shape[2])).contiguous()


def _scale(largest: Tensor, largest_code: float) -> Tensor:
    return largest.clamp(min=1e-12) / largest_code


def _spread_blocks(scales_EPnc: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    rows = scales_EPnc.repeat_interleave(FP8_BLOCK, dim=2)[:, :, :num_outputs]
    return rows.repeat_interleave(FP8_BLOCK, dim=3)[..., :num_inputs].flatten(1, 2)
