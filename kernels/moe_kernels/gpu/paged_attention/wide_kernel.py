# mypy: disable-error-code="no-untyped-def"
"""Prefill of rows so wide that two accumulators do not fit into the registers: latent attention.

As `attend_tiles` in kernel.py, and with the same sums in the same order, but what was joined of the
splits before lies in a scratch of the program's own, in global memory. There are as many programs
as processors, so all scratches together stay in the L2 cache; each takes one tile after the other.

M rows of a tile, V values' width, C columns that are joined at once.
"""

import triton
import triton.language as tl

from moe_kernels.gpu.paged_attention.kernel import (
    TILE_FIELDS,
    _attend_split,
    _join_sums,
    _join_values,
    _start,
)
from moe_kernels.gpu.paged_attention.tile_rows import first_visible, load_q, rows_of


@triton.jit
def _join_in_scratch(
    scratch_ptr, o_split, old, new, is_first,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """scratch [2, M, V]: what was joined, and the split's values on their way to other threads."""
    at_M, at_C = tl.arange(0, BLOCK_M)[:, None] * BLOCK_V, tl.arange(0, BLOCK_C)[None, :]
    split_ptr = scratch_ptr + BLOCK_M * BLOCK_V
    tl.store(split_ptr + at_M + tl.arange(0, BLOCK_V)[None, :], o_split)
    tl.debug_barrier()
    for start in tl.range(0, BLOCK_V, BLOCK_C):
        at = at_M + start + at_C
        joined_ptr = scratch_ptr + at
        o = tl.load(joined_ptr, mask=(at >= 0) & (is_first == 0), other=0.0)
        tl.store(joined_ptr, _join_values(o, tl.load(split_ptr + at), old, new))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_tiles"])
def attend_wide_tiles(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tiles_ptr, tables_ptr, sinks_ptr,
    scratch_ptr, out_ptr, num_tiles, table_stride, q_token_stride, q_head_stride,
    key_page_stride, key_head_stride, key_token_stride, value_page_stride, value_head_stride,
    value_token_stride, out_token_stride, out_head_stride, scale_log2, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, IS_LATENT: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr,
    SCALES: tl.constexpr, PAGE: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program takes every P-th of tiles x Hkv x head blocks: neighbours share keys and values.

    Grid: P programs, scratch [P, 2, M, V] in fp32. Empty tiles are skipped. `sinks_ptr` [H] in fp32
    or None. Order of sums: the sink, then the splits, ascending.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    HEAD_PROGRAMS: tl.constexpr = NUM_KV_HEADS * HEAD_BLOCKS
    scratch_ptr += tl.program_id(0).to(tl.int64) * (2 * BLOCK_M * BLOCK_V)
    for piece in tl.range(tl.program_id(0), num_tiles * HEAD_PROGRAMS, tl.num_programs(0)):
        head_program = piece % HEAD_PROGRAMS
        kv_head, head_block = head_program // HEAD_BLOCKS, head_program % HEAD_BLOCKS
        tile_ptr = tiles_ptr + piece // HEAD_PROGRAMS * TILE_FIELDS
        sequence, first_token = tl.load(tile_ptr), tl.load(tile_ptr + 1)
        num_tokens, first_position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
        rows = rows_of(first_token, num_tokens, kv_head, head_block, GROUP, BLOCK_HEADS, BLOCK_M)
        token_M, head_M, is_row_M, at_M = rows
        token_M = tl.maximum(token_M, 0)  # of no tokens: row 0 is read, and no split
        q_MD, q_MR = load_q(
            q_ptr, token_M, head_M, q_token_stride, q_head_stride,
            (q_ptr if BITS > 0 else keys_ptr).dtype.element_ty, HEAD_DIM, BLOCK_D, BLOCK_R,
        )  # fmt: skip
        position_M, length = first_position + at_M, first_position + num_tokens
        first_M = first_visible(position_M, WINDOW, CHUNK)
        m, z = _start(sinks_ptr, head_M, is_row_M, BLOCK_M)
        lowest = first_visible(first_position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
        first_split = lowest // SPLIT_TOKENS
        for split in tl.range(first_split, (length + SPLIT_TOKENS - 1) // SPLIT_TOKENS):
            m_split, z_split, o_split = _attend_split(
                q_MD, q_MR, position_M, first_M,
                tl.maximum(split * SPLIT_TOKENS, lowest),
                tl.minimum((split + 1) * SPLIT_TOKENS, length),
                keys_ptr + kv_head * key_head_stride, values_ptr + kv_head * value_head_stride,
                key_scales_ptr, value_scales_ptr, kv_head,
                tables_ptr + sequence * table_stride, key_page_stride, key_token_stride,
                value_page_stride, value_token_stride, scale_log2, NUM_KV_HEADS, HEAD_DIM,
                VALUE_DIM, WINDOW, CHUNK, IS_LATENT, SPLIT, BITS, SCALES, PAGE,
                BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R, BLOCK_V,
            )  # fmt: skip
            m, z, old, new = _join_sums(m, z, m_split, z_split)
            first = (split == first_split).to(tl.int32)
            _join_in_scratch(scratch_ptr, o_split, old, new, first, BLOCK_M, BLOCK_V, BLOCK_C)
        out_rows = out_ptr + (token_M * out_token_stride + head_M * out_head_stride)[:, None]
        at_M, at_C = tl.arange(0, BLOCK_M)[:, None] * BLOCK_V, tl.arange(0, BLOCK_C)[None, :]
        for start in tl.static_range(0, BLOCK_V, BLOCK_C):
            o = tl.load(scratch_ptr + at_M + start + at_C) / z[:, None]
            is_stored = is_row_M[:, None] & (start + at_C < VALUE_DIM)
            tl.store(out_rows + start + at_C, o.to(out_ptr.dtype.element_ty), mask=is_stored)
        tl.debug_barrier()
