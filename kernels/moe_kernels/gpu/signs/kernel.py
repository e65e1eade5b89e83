"""Products of rows with matrices of one bit per weight, for rows of many adapters in one launch.

    S slots, M slots of a tile, X matrices, P parts (gate and up, or one)
    C inputs, N outputs of a part

A tile's slots have one matrix. The signs become 1 or -1 in registers, exact in any dtype, and are
the left operand, as the weights of the grouped products are. One output's sum runs over blocks of
BLOCK_C inputs, ascending, in one fp32 accumulator, so a row does not depend on other rows.
"""

import triton
import triton.language as tl

from moe_kernels.gpu.grouped_gemm.tile import inputs_of, slots_of, tile_of


@triton.jit(do_not_specialize=["num_slots", "num_matrices"])
def signed_product_kernel(
    x_ptr, rows_ptr, table_ptr, base_ptr, out_ptr, tile_matrices_ptr, sorted_slots_ptr,
    num_tiles_ptr, num_slots, num_matrices, num_inputs, num_outputs, num_bytes,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP_M: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """out [S, P N] = base + scale * (signs x) + bias; base may be None, x is [rows, C].

    rows [S] int64: the row of x of each slot. table [X, P, 4] int64: the addresses of signs
    [N, num_bytes], of scales and of the bias (fp32; 0: there is none), and the step between scales.
    Grid (max_tiles * ceil(N / BLOCK_N), P).
    """
    num_blocks_n = tl.cdiv(num_outputs, BLOCK_N)
    num_tiles = tl.load(num_tiles_ptr)
    if tl.program_id(0) >= num_tiles * num_blocks_n:
        return
    tile, block_n = tile_of(tl.program_id(0), num_tiles, num_blocks_n, GROUP_M)
    matrix = tl.load(tile_matrices_ptr + tile).to(tl.int64)
    if (matrix < 0) | (matrix >= num_matrices):
        return
    slots, positions, is_slot = slots_of(tile, sorted_slots_ptr, num_slots, BLOCK_M, False)
    rows = tl.load(rows_ptr + slots, mask=is_slot, other=0)
    outputs = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    entry = table_ptr + (matrix * PARTS + part) * 4
    acc = _summed(
        x_ptr + rows[None, :] * num_inputs, tl.load(entry), outputs, is_slot, num_inputs,
        num_outputs, num_bytes, BLOCK_M, BLOCK_N, BLOCK_C, IS_EVEN,
    )  # fmt: skip
    is_row = outputs < num_outputs
    acc = _scaled(acc, entry, outputs, is_row)
    columns = part * num_outputs + outputs
    places = slots.to(tl.int64)[None, :] * (PARTS * num_outputs) + columns[:, None]
    mask = is_slot[None, :] & is_row[:, None]
    if base_ptr is not None:
        acc += tl.load(base_ptr + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _summed(
    x_row, signs_at, outputs, is_slot, num_inputs, num_outputs, num_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """The sums [N, M] of inputs with their signs; any values if there are no signs (address 0)."""
    is_row = (outputs < num_outputs) & (signs_at != 0)
    signs_row = signs_at.to(tl.pointer_type(tl.uint8)) + outputs.to(tl.int64)[:, None] * num_bytes
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, num_inputs, BLOCK_C):
        x = inputs_of(x_row, start, is_slot, num_inputs, BLOCK_C, IS_EVEN)
        inputs = start + tl.arange(0, BLOCK_C)
        mask = is_row[:, None]
        if not IS_EVEN:
            mask = mask & (inputs < num_inputs)[None, :]
        eight = tl.load(signs_row + (inputs // 8)[None, :], mask=mask, other=0).to(tl.int32)
        signs = ((eight >> (inputs % 8)[None, :]) & 1) * 2 - 1
        acc = tl.dot(signs.to(x.dtype), x, acc, input_precision="ieee")
    return acc


@triton.jit
def _scaled(acc, entry, outputs, is_row):
    """The sums times the scale of their output, plus its bias; zeros if there are no signs."""
    scales_at, bias_at, step = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    scales_ptr = scales_at.to(tl.pointer_type(tl.float32))
    scales = tl.load(scales_ptr + outputs * step, mask=is_row & (scales_at != 0), other=0.0)
    bias_ptr = bias_at.to(tl.pointer_type(tl.float32))
    bias = tl.load(bias_ptr + outputs, mask=is_row & (bias_at != 0), other=0.0)
    return acc * scales[:, None] + bias[:, None]
