"""Grouped matrix products over tiles of slots of one expert, and the weighted sum of the choices.

    T rows, S slots (rows times choices K), E experts, M slots of a tile, P = tiles * M positions
    C inputs (the sum runs over them), N outputs; D model width, F expert width

The first product takes C = D inputs of row `slot // K` to N = F hidden values, gate and up at once,
and writes them at the slot's position; the second takes C = F of a position to N = D, written at
the slot. Weights are [E, N, C], C contiguous; the first product's are [E, 2 N, C], gate before up.

One output's sum runs over blocks of BLOCK_C inputs, ascending, in one fp32 accumulator that one
program owns. BLOCK_C depends on the weights alone, so a row's result does not depend on the others.

FORMAT of the weights (pack.py): "plain", "int8", "fp8_channel", "fp8_block", "int4", "int4_zero",
"mxfp4".
"""

import triton
import triton.language as tl


@triton.jit
def _tile_of(program, num_tiles, num_blocks_n, GROUP: tl.constexpr):
    """Programs -> (tile, block of outputs): GROUP neighbouring tiles share weights in the cache."""
    per_group = GROUP * num_blocks_n
    first = (program // per_group) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = program % per_group
    return first + within % size, within // size


@triton.jit
def _slots_of(tile, sorted_slots_ptr, num_slots, top_k, BLOCK_M: tl.constexpr,
              IS_DIRECT: tl.constexpr):
    """Of a tile: its slots, their positions, their rows of x, and which are slots at all."""
    lanes = tl.arange(0, BLOCK_M)
    if IS_DIRECT:
        slots = tl.where(lanes == 0, tile, num_slots)
        positions = tile + lanes
    else:
        positions = tile * BLOCK_M + lanes
        slots = tl.load(sorted_slots_ptr + positions)
    is_slot = slots < num_slots
    return slots, positions, slots // top_k, is_slot


@triton.jit
def _activated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """g sigmoid(alpha g) (u + offset), g = min(gate, limit), u = up within +-limit; fp32."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + UP_OFFSET)


@triton.jit
def _e4m3(bits, HAS_FP8: tl.constexpr):
    """The values of e4m3 bits (uint8), exact, in float16. No NaN."""
    if HAS_FP8:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = bits.to(tl.int16)
    half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    # The exponent's bias is 15 in place of 7: 2^8 too small, subnormal numbers too.
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _e2m1(codes):
    """The values of e2m1 codes, exact, as fp32 times 2^-14: float16 with bias 15 in place of 1."""
    wide = codes.to(tl.int16)
    half = ((wide & 7) << 9) | ((wide & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantised(codes, group, scales_ptr, zeros_ptr, is_row, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Codes [N, C of one group] -> weights in DTYPE: (code - zero) * scale in fp32, rounded once."""
    if FORMAT == "mxfp4":
        exponent = tl.load(scales_ptr + group, mask=is_row, other=0).to(tl.float32)
        return (_e2m1(codes) * tl.exp2(exponent - 113.0)[:, None]).to(DTYPE)
    else:
        scale = tl.load(scales_ptr + group, mask=is_row, other=0.0)
        if FORMAT == "int4_zero":
            zero = tl.load(zeros_ptr + group, mask=is_row, other=0).to(tl.int32)
            return ((codes.to(tl.int32) - zero[:, None]).to(tl.float32) * scale[:, None]).to(DTYPE)
        else:
            return ((codes.to(tl.int32) - 8).to(tl.float32) * scale[:, None]).to(DTYPE)


@triton.jit
def _multiply_added(
    acc,
    x,
    x_high,
    weight_row_ptr,  # [N, 1]: where each output's weights begin
    scales_row_ptr,  # [N]: where its scales begin; of "fp8_block" one for all
    zeros_row_ptr,
    start,
    num_inputs,
    is_row,
    FORMAT: tl.constexpr,
    GROUP_C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """acc [N, M] + weights [N, BLOCK_C] from input `start` on, times x [BLOCK_C, M]."""
    DTYPE: tl.constexpr = x.dtype
    if FORMAT == "int4" or FORMAT == "int4_zero" or FORMAT == "mxfp4":
        # A byte holds inputs j (low) and j + BLOCK_C / 2 (high): no shuffle, each half one group.
        HALF: tl.constexpr = BLOCK_C // 2
        packed = tl.load(
            weight_row_ptr + start // 2 + tl.arange(0, HALF)[None, :], mask=is_row[:, None], other=0
        )
        low = _dequantised(packed & 15, start // GROUP_C, scales_row_ptr, zeros_row_ptr, is_row,
                           FORMAT, DTYPE)
        high = _dequantised(packed >> 4, (start + HALF) // GROUP_C, scales_row_ptr, zeros_row_ptr,
                            is_row, FORMAT, DTYPE)
        acc = tl.dot(low, x, acc, input_precision="ieee")
        return tl.dot(high, x_high, acc, input_precision="ieee")
    else:
        inputs = start + tl.arange(0, BLOCK_C)
        mask = is_row[:, None]
        if not IS_EVEN:
            mask = mask & (inputs < num_inputs)[None, :]
        weight = tl.load(weight_row_ptr + inputs[None, :], mask=mask, other=0)
        if FORMAT == "fp8_channel" or FORMAT == "fp8_block":
            weight = _e4m3(weight, HAS_FP8)
            if DTYPE != tl.float16:
                weight = weight.to(tl.float32)
        weight = weight.to(DTYPE)
        if FORMAT == "fp8_block":
            scale = tl.load(scales_row_ptr + start // GROUP_C)
            return acc + tl.dot(weight, x, input_precision="ieee") * scale
        else:
            return tl.dot(weight, x, acc, input_precision="ieee")


@triton.jit
def grouped_gemm_kernel(
    x_ptr,  # [T, C], or [P, C] for the second product
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [E, N] or [E, 2 N]
    out_ptr,  # [P, N], or [S, N] for the second product
    tile_experts_ptr,
    sorted_slots_ptr,
    num_tiles_ptr,
    max_tiles,
    num_slots,
    num_experts,
    top_k,
    num_inputs,
    num_outputs,
    weight_stride,  # elements of weight_ptr from one output to the next
    scales_stride,  # groups of one output (block formats: of a row of blocks)
    FORMAT: tl.constexpr,
    GROUP_C: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_DIRECT: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_FP8: tl.constexpr,
):
    """Either product with operands swapped: weights [N, C] times x transposed [C, M].

    The outputs are the 64 or more rows that wgmma wants, so that a tile of 16 slots wastes none.
    Grid (max_tiles * ceil(N / BLOCK_N)); a program computes BLOCK_N outputs of one tile. Unused
    tiles end at once. `num_tiles_ptr` None with IS_DIRECT: each slot is a tile.
    """
    num_blocks_n = tl.cdiv(num_outputs, BLOCK_N)
    if IS_DIRECT:
        num_tiles = max_tiles
    else:
        num_tiles = tl.load(num_tiles_ptr)
    if tl.program_id(0) >= num_tiles * num_blocks_n:
        return
    tile, block_n = _tile_of(tl.program_id(0), num_tiles, num_blocks_n, GROUP_M)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if (expert < 0) | (expert >= num_experts):
        return
    slots, positions, rows, is_slot = _slots_of(
        tile, sorted_slots_ptr, num_slots, top_k, BLOCK_M, IS_DIRECT
    )
    if not IS_GATED:
        rows = positions
    outputs = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = outputs < num_outputs
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    IS_PACKED: tl.constexpr = FORMAT == "int4" or FORMAT == "int4_zero" or FORMAT == "mxfp4"
    STEP: tl.constexpr = BLOCK_C // 2 if IS_PACKED else BLOCK_C

    first = expert * PARTS * num_outputs
    weight_row = weight_ptr + (first + outputs)[:, None] * weight_stride
    up_row = weight_row + num_outputs.to(tl.int64) * weight_stride
    if FORMAT == "fp8_block":
        # One scale for all outputs of the program: BLOCK_N divides GROUP_C, gate and up apart.
        num_rows = tl.cdiv(num_outputs, GROUP_C)
        scales_row = scales_ptr + (
            expert * PARTS * num_rows + block_n * BLOCK_N // GROUP_C
        ) * scales_stride
        up_scales_row = scales_row + num_rows * scales_stride
        zeros_row = scales_row
        up_zeros_row = scales_row
    elif IS_PACKED:
        scales_row = scales_ptr + (first + outputs) * scales_stride
        up_scales_row = scales_row + num_outputs * scales_stride
        if FORMAT == "int4_zero":
            zeros_row = zeros_ptr + (first + outputs) * scales_stride
            up_zeros_row = zeros_row + num_outputs * scales_stride
        else:
            zeros_row = scales_row
            up_zeros_row = scales_row
    else:
        scales_row = outputs
        up_scales_row = outputs
        zeros_row = outputs
        up_zeros_row = outputs

    x_row = x_ptr + rows.to(tl.int64)[None, :] * num_inputs
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if IS_GATED:
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, num_inputs, BLOCK_C):
        inputs = start + tl.arange(0, STEP)
        mask = is_slot[None, :]
        if not IS_EVEN:
            mask = mask & (inputs < num_inputs)[:, None]
        x = tl.load(x_row + inputs[:, None], mask=mask, other=0.0)
        if IS_PACKED:
            inputs += STEP
            mask = is_slot[None, :]
            if not IS_EVEN:
                mask = mask & (inputs < num_inputs)[:, None]
            x_high = tl.load(x_row + inputs[:, None], mask=mask, other=0.0)
        else:
            x_high = x
        acc = _multiply_added(
            acc, x, x_high, weight_row, scales_row, zeros_row, start, num_inputs, is_row,
            FORMAT, GROUP_C, BLOCK_C, IS_EVEN, HAS_FP8,
        )
        if IS_GATED:
            acc_up = _multiply_added(
                acc_up, x, x_high, up_row, up_scales_row, up_zeros_row, start, num_inputs, is_row,
                FORMAT, GROUP_C, BLOCK_C, IS_EVEN, HAS_FP8,
            )

    acc = _finished(acc, scales_ptr, bias_ptr, first + outputs, is_row, FORMAT)
    if IS_GATED:
        acc_up = _finished(acc_up, scales_ptr, bias_ptr, first + num_outputs + outputs, is_row, FORMAT)
        acc = _activated(acc, acc_up, ALPHA, LIMIT, UP_OFFSET)
        places = positions
    else:
        places = slots
    out = out_ptr + places.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_slot[None, :] & is_row[:, None])


@triton.jit
def _finished(acc, scales_ptr, bias_ptr, outputs, is_row, FORMAT: tl.constexpr):
    """The sums [N, M] times the outputs' scales, plus their bias."""
    if FORMAT == "int8" or FORMAT == "fp8_channel":
        acc = acc * tl.load(scales_ptr + outputs, mask=is_row, other=0.0)[:, None]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + outputs, mask=is_row, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def grouped_gemm_tma_kernel(
    x,  # [T, C] as a pointer, or [P, C] as a descriptor of [BLOCK_M, BLOCK_C] for the second
    weight,  # [E * N, C] or [E * 2 N, C]: a descriptor of [BLOCK_N, BLOCK_C]
    bias_ptr,
    out_ptr,
    tile_experts_ptr,
    sorted_slots_ptr,
    num_tiles_ptr,
    num_slots,
    top_k,
    num_inputs,
    num_outputs,
    IS_GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP_M: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Either product for many rows, weights as they are: x [M, C] times weights transposed.

    Persistent: any grid; a program takes every `grid`-th piece of BLOCK_N outputs of one tile, in
    the cache-friendly order, up to the number of tiles in use. Weights, and the positions that the
    second product reads, come by TMA; zeros stand for what lies outside. A block of the last
    outputs may read rows of the next expert, which are not stored.
    """
    num_tiles = tl.load(num_tiles_ptr)
    num_blocks_n = tl.cdiv(num_outputs, BLOCK_N)
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    for piece in range(tl.program_id(0), num_tiles * num_blocks_n, tl.num_programs(0)):
        tile, block_n = _tile_of(piece, num_tiles, num_blocks_n, GROUP_M)
        expert = tl.load(tile_experts_ptr + tile)
        slots, positions, rows, is_slot = _slots_of(
            tile, sorted_slots_ptr, num_slots, top_k, BLOCK_M, False
        )
        outputs = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = outputs < num_outputs
        first = expert * PARTS * num_outputs
        weight_row = first + block_n * BLOCK_N
        x_row = x + rows.to(tl.int64)[None, :] * num_inputs if IS_GATED else x
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_GATED:
            acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, num_inputs, BLOCK_C):
            if IS_GATED:
                inputs = start + tl.arange(0, BLOCK_C)
                mask = is_slot[None, :]
                if not IS_EVEN:
                    mask = mask & (inputs < num_inputs)[:, None]
                x_tile = tl.load(x_row + inputs[:, None], mask=mask, other=0.0)
            else:
                x_tile = x.load([tile * BLOCK_M, start]).T
            acc = tl.dot(weight.load([weight_row, start]), x_tile, acc, input_precision="ieee")
            if IS_GATED:
                up = weight.load([weight_row + num_outputs, start])
                acc_up = tl.dot(up, x_tile, acc_up, input_precision="ieee")
        acc = _finished(acc, None, bias_ptr, first + outputs, is_row, "plain")
        if IS_GATED:
            acc_up = _finished(acc_up, None, bias_ptr, first + num_outputs + outputs, is_row, "plain")
            acc = _activated(acc, acc_up, ALPHA, LIMIT, UP_OFFSET)
            places = positions
        else:
            places = slots
        out = out_ptr + places.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_slot[None, :] & is_row[:, None])


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
    """out [T, D] fp32 = sum over k of weights [T, K] * y [T * K, D]; k ascends, fp32 throughout.

    Grid (T, ceil(D / BLOCK_D)). Ids ascend in a row, so the sum is by expert; one that is not in
    [0, E) adds nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < width
    acc = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = row * TOP_K + k
        expert = tl.load(ids_ptr + slot)
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        is_here = (expert >= 0) & (expert < num_experts)
        y = tl.load(y_ptr + slot * width + columns, mask=mask & is_here, other=0.0).to(tl.float32)
        acc += y * weight
    tl.store(out_ptr + row * width + columns, acc, mask=mask)
