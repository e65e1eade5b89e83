"""Pieces of the grouped products' kernels: tiles, rows, and what follows the sum.

T rows, S slots, M slots of a tile, N outputs of a program. Sums are [N, M], fp32.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(program, num_tiles, num_blocks_n, GROUP: tl.constexpr):
    """Programs -> (tile, block of outputs): GROUP neighbouring tiles share weights in the cache.

    Example, GROUP 2, 3 tiles, 2 blocks: (0,0) (1,0) (0,1) (1,1) | (2,0) (2,1).
    """
    per_group = GROUP * num_blocks_n
    first = (program // per_group) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = program % per_group
    return first + within % size, within // size


@triton.jit
def slots_of(
    tile, sorted_slots_ptr, num_slots, BLOCK_M: tl.constexpr, IS_DIRECT: tl.constexpr
):  # fmt: skip
    """Reads a tile [M]: its slots, their positions, and a mask of the entries that are slots."""
    lanes = tl.arange(0, BLOCK_M)
    if IS_DIRECT:
        positions = tile + lanes
        slots = tl.where(lanes == 0, tile, num_slots)
    else:
        positions = tile * BLOCK_M + lanes
        slots = tl.load(sorted_slots_ptr + positions)
    return slots, positions, slots < num_slots


@triton.jit
def inputs_of(
    x_row, start, is_slot, num_inputs, BLOCK_C: tl.constexpr, IS_EVEN: tl.constexpr
):  # fmt: skip
    """x [BLOCK_C, M] from input `start` on; `x_row` [1, M] points at each slot's inputs."""
    inputs = start + tl.arange(0, BLOCK_C)
    mask = is_slot[None, :]
    if not IS_EVEN:
        mask = mask & (inputs < num_inputs)[:, None]
    return tl.load(x_row + inputs[:, None], mask=mask, other=0.0)


@triton.jit
def finished(acc, scales_ptr, bias_ptr, rows, is_row, HAS_ROW_SCALES: tl.constexpr):
    """The sums times the scale of their row of weights, plus its bias."""
    if HAS_ROW_SCALES:
        acc = acc * tl.load(scales_ptr + rows, mask=is_row, other=0.0)[:, None]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit
def with_added(acc, added_ptr, added_ids_ptr, slots, is_slot, columns, is_row, width):
    """The sums, to which slots with an adapter add their row of `added` [S, width], which has less
    than 2^31 values: 64-bit places would not fit the registers."""
    if added_ptr is not None:
        is_added = tl.load(added_ids_ptr + slots, mask=is_slot, other=-1) >= 0
        added = added_ptr + (slots[None, :] * width + columns[:, None])
        mask = is_added[None, :] & is_row[:, None]
        acc = tl.where(mask, acc + tl.load(added, mask=mask, other=0.0), acc)
    return acc


@triton.jit
def activated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """g sigmoid(alpha g) (u + offset), g = min(gate, limit), u = up within +-limit; a NaN stays."""
    KEPT: tl.constexpr = tl.PropagateNan.ALL
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=KEPT)
        up = tl.maximum(up, -LIMIT, propagate_nan=KEPT)
        up = tl.minimum(up, LIMIT, propagate_nan=KEPT)
    return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + UP_OFFSET)


@triton.jit
def store_columns(acc, out_ptr, places, outputs, num_outputs, is_slot):
    """acc [N, M], rounded once, as columns: slot m's outputs go to row `places[m]` of out."""
    out = out_ptr + places.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    mask = is_slot[None, :] & (outputs < num_outputs)[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
