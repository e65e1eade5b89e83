"""The grouped products for many rows: persistent, weights and positions by TMA.

Names, shapes and the order of the sums are those of kernel.py.
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
)


@triton.jit(do_not_specialize=["num_slots"])
def grouped_gemm_tma_kernel(
    x, weight, bias_ptr, out_ptr, tile_experts_ptr, sorted_slots_ptr, num_tiles_ptr,
    num_slots, top_k, num_inputs, num_outputs, IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, GROUP_M: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Either product. x: a pointer to [T, C], or a descriptor of [P, C], blocks [M, BLOCK_C];
    weight: a descriptor of [E * (2) N, C], blocks [BLOCK_N, BLOCK_C]; out [P, N] or [S, N].

    Any grid: a program takes every `grid`-th piece of BLOCK_N outputs of one tile, up to the tiles
    in use. Zeros stand for what lies outside a descriptor; a last block of outputs may read rows
    of the next part, which are not stored.
    """
    num_tiles = tl.load(num_tiles_ptr)
    num_blocks_n = tl.cdiv(num_outputs, BLOCK_N)
    for piece in range(tl.program_id(0), num_tiles * num_blocks_n, tl.num_programs(0)):
        tile, block_n = tile_of(piece, num_tiles, num_blocks_n, GROUP_M)
        expert = tl.load(tile_experts_ptr + tile)
        slots, positions, is_slot = slots_of(tile, sorted_slots_ptr, num_slots, BLOCK_M, False)
        outputs = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = outputs < num_outputs
        first = (expert * 2 if IS_GATED else expert) * num_outputs
        row = first + block_n * BLOCK_N
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_GATED:
            x_row = x + (slots // top_k).to(tl.int64)[None, :] * num_inputs
            acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, num_inputs, BLOCK_C):
            if IS_GATED:
                x_tile = inputs_of(x_row, start, is_slot, num_inputs, BLOCK_C, IS_EVEN)
            else:
                x_tile = x.load([tile * BLOCK_M, start]).T
            acc = tl.dot(weight.load([row, start]), x_tile, acc, input_precision="ieee")
            if IS_GATED:
                up = weight.load([row + num_outputs, start])
                acc_up = tl.dot(up, x_tile, acc_up, input_precision="ieee")
        acc = finished(acc, None, bias_ptr, first + outputs, is_row, False)
        if IS_GATED:
            up_rows = first + num_outputs + outputs
            acc_up = finished(acc_up, None, bias_ptr, up_rows, is_row, False)
            acc = activated(acc, acc_up, ALPHA, LIMIT, UP_OFFSET)
        places = positions if IS_GATED else slots
        store_columns(acc, out_ptr, places, outputs, num_outputs, is_slot)
