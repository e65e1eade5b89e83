"""Pieces of the grouped products' kernels: weights of every format, dequantised in registers.

N outputs of a program, C inputs of a step. The formats are those of pack.py.
"""

import triton
import triton.language as tl


@triton.jit
def weight_rows(
    weight_ptr, scales_ptr, zeros_ptr, part, outputs, num_outputs, weight_stride, scales_stride,
    FORMAT: tl.constexpr, GROUP_C: tl.constexpr,
):  # fmt: skip
    """Locate the weights [N, 1], scales and zeros [N] of these outputs of a part.

    `part`: expert, or 2 * expert (gate), or 2 * expert + 1 (up); int64. "fp8_block" has one scale
    for all the outputs of a program, whose number divides 128.
    """
    rows = part * num_outputs + outputs
    scales = outputs
    zeros = outputs
    if FORMAT == "fp8_block":
        block = part * tl.cdiv(num_outputs, GROUP_C) + tl.min(outputs) // GROUP_C
        scales = scales_ptr + block * scales_stride
    elif FORMAT == "int4" or FORMAT == "int4_zero" or FORMAT == "int8_zero" or FORMAT == "mxfp4":
        scales = scales_ptr + rows * scales_stride
        if FORMAT == "int4_zero" or FORMAT == "int8_zero":
            zeros = zeros_ptr + rows * scales_stride
    return weight_ptr + rows[:, None] * weight_stride, scales, zeros


@triton.jit
def multiply_added(
    acc, x, x_high, weight_row, scales_row, zeros_row, start, num_inputs, is_row,
    FORMAT: tl.constexpr, GROUP_C: tl.constexpr, BLOCK_C: tl.constexpr, IS_EVEN: tl.constexpr,
    HAS_FP8: tl.constexpr,
):  # fmt: skip
    """acc [N, M] + weights [N, BLOCK_C] from input `start` on, times x [BLOCK_C, M].

    Packed formats take x as two halves: a byte holds an input of either, so that nothing is
    shuffled, and a half lies in one group.
    """
    DTYPE: tl.constexpr = x.dtype
    if FORMAT == "int4" or FORMAT == "int4_zero" or FORMAT == "mxfp4":
        HALF: tl.constexpr = BLOCK_C // 2
        bytes_row = weight_row + start // 2 + tl.arange(0, HALF)[None, :]
        packed = tl.load(bytes_row, mask=is_row[:, None], other=0)
        low = _dequantised(
            packed & 15, start // GROUP_C, scales_row, zeros_row, is_row, FORMAT, DTYPE
        )
        high = _dequantised(
            packed >> 4, (start + HALF) // GROUP_C, scales_row, zeros_row, is_row, FORMAT, DTYPE
        )
        acc = tl.dot(low, x, acc, input_precision="ieee")
        acc = tl.dot(high, x_high, acc, input_precision="ieee")
    else:
        inputs = start + tl.arange(0, BLOCK_C)
        mask = is_row[:, None]
        if not IS_EVEN:
            mask = mask & (inputs < num_inputs)[None, :]
        weight = tl.load(weight_row + inputs[None, :], mask=mask, other=0)
        if FORMAT == "int8_zero":
            weight = _dequantised(
                weight, start // GROUP_C, scales_row, zeros_row, is_row, FORMAT, DTYPE
            )
        if FORMAT == "fp8_channel" or FORMAT == "fp8_block":
            weight = _e4m3(weight, HAS_FP8).to(tl.float32)
        weight = weight.to(DTYPE)
        if FORMAT == "fp8_block":
            scale = tl.load(scales_row + start // GROUP_C)
            acc += tl.dot(weight, x, input_precision="ieee") * scale
        else:
            acc = tl.dot(weight, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _dequantised(
    codes, group, scales_row, zeros_row, is_row, FORMAT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Codes [N, C] of one group -> (code - zero) * scale in fp32, rounded once to DTYPE."""
    if FORMAT == "mxfp4":
        exponent = tl.load(scales_row + group, mask=is_row, other=0).to(tl.int32)
        # 2^(exponent - 127), and the 2^14 that _e2m1 leaves out.
        scale = ((exponent + 14) << 23).to(tl.float32, bitcast=True)
        values = _e2m1(codes)
    else:
        scale = tl.load(scales_row + group, mask=is_row, other=0.0).to(tl.float32)
        values = codes.to(tl.int32)
        if FORMAT == "int4_zero" or FORMAT == "int8_zero":
            values -= tl.load(zeros_row + group, mask=is_row, other=0).to(tl.int32)[:, None]
        else:
            values -= 8
        values = values.to(tl.float32)
    return (values * scale[:, None]).to(DTYPE)


@triton.jit
def _e4m3(bits, HAS_FP8: tl.constexpr):
    """The values of e4m3 bits (uint8), exact, in float16. No NaN."""
    if HAS_FP8:
        values = bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = bits.to(tl.int16)
        half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        # The exponent's bias is 15 in place of 7: 2^8 too small, subnormal numbers too.
        values = half.to(tl.float16, bitcast=True) * 256.0
    return values


@triton.jit
def _e2m1(codes):
    """2^-14 times the values of e2m1 codes, exact: as float16, whose bias is 15 in place of 1."""
    wide = codes.to(tl.int16)
    half = ((wide & 7) << 9) | ((wide & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32)
