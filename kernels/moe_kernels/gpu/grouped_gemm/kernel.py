"""Grouped matrix products over tiles of slots of one expert, and the weighted sum of the choices.

    T rows, S slots (rows times choices K), E experts, M slots of a tile, P = tiles * M positions
    C inputs (the sum runs over them), N outputs; D model width, F expert width

The first product takes C = D inputs of row `slot // K` to N = F hidden values, gate and up at once,
and writes them at the slot's position; the second takes C = F of a position to N = D, written at
the slot. Weights are [E, N, C], C contiguous; the first product's are [E, 2 N, C], gate before up.

Weights are the left operand, [N, C] times x [C, M]: the outputs are the 64 or more rows that wgmma
wants, and a tile of 16 slots wastes none. One output's sum runs over blocks of BLOCK_C inputs,
ascending, in one fp32 accumulator that one program owns. BLOCK_C depends on the weights alone, so
a row's result depends neither on other rows nor on the size of the tile.
"""

import triton
import triton.language as tl

from moe_kernels.gpu.grouped_gemm.tile import (
    activated,
    finished,
    inputs_of,
    slots_of,
    store_columns,
    tile_of,
    with_added,
)
from moe_kernels.gpu.grouped_gemm.weights import multiply_added, weight_rows


@triton.jit(do_not_specialize=["max_tiles", "num_slots"])
def grouped_gemm_kernel(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, added_ptr, added_ids_ptr, out_ptr,
    tile_experts_ptr, sorted_slots_ptr, num_tiles_ptr, max_tiles, num_slots, num_experts, top_k,
    num_inputs, num_outputs, weight_stride, scales_stride,
    FORMAT: tl.constexpr, GROUP_C: tl.constexpr, IS_GATED: tl.constexpr, IS_DIRECT: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUP_M: tl.constexpr,
    IS_EVEN: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """Either product, any format. x [T, C] or [P, C]; out [P, N] or [S, N]; bias [E, (2) N].
    added [S, (2) N] fp32 joins the sums of slots whose number in added_ids [S] is not negative.

    Grid (max_tiles * ceil(N / BLOCK_N)): a program computes BLOCK_N outputs of one tile; those of
    unused tiles end at once. IS_DIRECT: a slot is a tile, with its id as the expert.
    """
    num_blocks_n = tl.cdiv(num_outputs, BLOCK_N)
    num_tiles = max_tiles if IS_DIRECT else tl.load(num_tiles_ptr)
    if tl.program_id(0) >= num_tiles * num_blocks_n:
        return
    tile, block_n = tile_of(tl.program_id(0), num_tiles, num_blocks_n, GROUP_M)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    slots, positions, is_slot = slots_of(tile, sorted_slots_ptr, num_slots, BLOCK_M, IS_DIRECT)
    rows = slots // top_k if IS_GATED else positions
    x_row = x_ptr + rows.to(tl.int64)[None, :] * num_inputs
    outputs = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    part = expert * 2 if IS_GATED else expert
    acc = _summed(
        x_row, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, added_ptr, added_ids_ptr, slots, part,
        outputs, is_slot, num_inputs, num_outputs, weight_stride, scales_stride,
        FORMAT, GROUP_C, IS_GATED, ALPHA, LIMIT, UP_OFFSET,
        BLOCK_M, BLOCK_N, BLOCK_C, IS_EVEN, HAS_FP8,
    )  # fmt: skip
    places = positions if IS_GATED else slots
    store_columns(acc, out_ptr, places, outputs, num_outputs, is_slot)


@triton.jit
def _summed(
    x_row, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, added_ptr, added_ids_ptr, slots, part,
    outputs, is_slot, num_inputs, num_outputs, weight_stride, scales_stride,
    FORMAT: tl.constexpr, GROUP_C: tl.constexpr, IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    IS_EVEN: tl.constexpr, HAS_FP8: tl.constexpr,
):  # fmt: skip
    """The outputs [N, M] of a program, fp32: the sum over all inputs, scaled, biased, activated."""
    IS_PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "int4_zero" or FORMAT == "mxfp4"
    HAS_ROW_SCALES: tl.constexpr = FORMAT == "int8" or FORMAT == "fp8_channel"
    STEP: tl.constexpr = BLOCK_C // 2 if IS_PACKED else BLOCK_C
    is_row = outputs < num_outputs
    weights, scales, zeros = weight_rows(
        weight_ptr, scales_ptr, zeros_ptr, part, outputs, num_outputs, weight_stride,
        scales_stride, FORMAT, GROUP_C,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if IS_GATED:
        up_weights, up_scales, up_zeros = weight_rows(
            weight_ptr, scales_ptr, zeros_ptr, part + 1, outputs, num_outputs, weight_stride,
            scales_stride, FORMAT, GROUP_C,
        )  # fmt: skip
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, num_inputs, BLOCK_C):
        x = inputs_of(x_row, start, is_slot, num_inputs, STEP, IS_EVEN)
        x_high = x
        if IS_PACKED:
            x_high = inputs_of(x_row, start + STEP, is_slot, num_inputs, STEP, IS_EVEN)
        acc = multiply_added(
            acc, x, x_high, weights, scales, zeros, start, num_inputs, is_row,
            FORMAT, GROUP_C, BLOCK_C, IS_EVEN, HAS_FP8,
        )  # fmt: skip
        if IS_GATED:
            acc_up = multiply_added(
                acc_up, x, x_high, up_weights, up_scales, up_zeros, start, num_inputs, is_row,
                FORMAT, GROUP_C, BLOCK_C, IS_EVEN, HAS_FP8,
            )  # fmt: skip
    rows = part * num_outputs + outputs
    acc = finished(acc, scales_ptr, bias_ptr, rows, is_row, HAS_ROW_SCALES)
    width = num_outputs * 2 if IS_GATED else num_outputs
    acc = with_added(acc, added_ptr, added_ids_ptr, slots, is_slot, outputs, is_row, width)
    if IS_GATED:
        rows += num_outputs
        acc_up = finished(acc_up, scales_ptr, bias_ptr, rows, is_row, HAS_ROW_SCALES)
        ups = outputs + num_outputs
        acc_up = with_added(acc_up, added_ptr, added_ids_ptr, slots, is_slot, ups, is_row, width)
        acc = activated(acc, acc_up, ALPHA, LIMIT, UP_OFFSET)
    return acc


# t + GRID - GRID is t's nearest multiple of 2^-36, see expert_mlp.py; exact in fp32 as well.
GRID = tl.constexpr(1.5 * 2**16)


@triton.jit
def combine_kernel(
    y_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    num_experts,
    width,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out [T, D] fp64, or rounded once to fp32 = sum over k of weights [T, K] * y [T * K, D].

    Grid (T, ceil(D / BLOCK_D)). Terms on a grid of 2^-36 in fp64, so that the sum is the same in
    any order (expert_mlp.combine_choices); an id that is not in [0, E) adds nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < width
    acc = tl.zeros([BLOCK_D], tl.float64)
    for k in tl.static_range(TOP_K):
        slot = row * TOP_K + k
        expert = tl.load(ids_ptr + slot)
        weight = tl.load(weights_ptr + slot).to(tl.float64)
        is_here = (expert >= 0) & (expert < num_experts)
        y = tl.load(y_ptr + slot * width + columns, mask=mask & is_here, other=0.0).to(tl.float64)
        term = (y * weight + GRID) - GRID
        acc += tl.where(is_here, term, 0.0)
    tl.store(out_ptr + row * width + columns, acc.to(out_ptr.dtype.element_ty), mask=mask)
