# mypy: disable-error-code="no-untyped-def"
"""Paged attention in Triton: one way to attend to a split of the keys, and two ways to join splits.

The key axis of every sequence is cut at fixed positions: splits of SPLIT_TOKENS, and blocks of
BLOCK_N within them. A row's sums run block after block within a split, each split from an empty
state, and then split after split; so they depend on the row's position and on nothing else.

    keys      0 ......... 255 | 256 ....... 511 | 512 .. 517     SPLIT_TOKENS = 256
    blocks    |  |  |  |  |   |  |  |  |  |     | |              BLOCK_N = 64
    row 517   (m, z, o) of 0     of 1              of 2          joined as ((sink + 0) + 1) + 2

Prefill walks over the splits in one program and joins as it goes (`attend_tiles`). Decode has one
program per split (`attend_items`), which leaves (m, z, o) in a workspace, and `join_items` does the
joining. Both call `_attend_split` and `_join_*`, and every sum that a compiler could contract is
written as an fma; with the same BLOCK_M, BLOCK_N and number of warps the two give the same bits. A
key that a row must not see, or a whole block or split of them, changes nothing: its weight is
exp2(-inf) = 0 and the factor of the old state exp2(0) = 1. So tiles may be cut in any way.

With another BLOCK_M tensor cores may add in another order (mma.sync against wgmma), and so may the
sum of a row's weights over warps: then equal bits are not promised.

M rows of a tile (tokens of one sequence x query heads of one key/value head), N keys of a block,
D and R two parts of a head's width (a power of two, and the rest), V values' width.
"""

import triton
import triton.language as tl

from moe_kernels.gpu.paged_attention.tile_rows import (
    first_visible,
    load_q,
    load_rows,
    rows_of,
)

TILE_FIELDS = tl.constexpr(6)  # see plan.py
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _join_sums(m, z, m_split, z_split):
    """The rows' maxima and sums of the splits before, and of the next one -> of both, and what
    the old and the new values are to be multiplied with. Maxima are of base-2 logits."""
    m_both = tl.maximum(m, m_split)
    top = tl.where(m_both == float("-inf"), 0.0, m_both)  # nothing seen yet
    old, new = tl.exp2(m - top), tl.exp2(m_split - top)
    return m_both, tl.fma(z, old, z_split * new), old[:, None], new[:, None]


@triton.jit
def _join_values(o, o_split, old, new):
    return tl.fma(o, old, o_split * new)


@triton.jit
def _attend_split(
    q_MD, q_MR, position_M, first_M, begin, end, keys_ptr, values_ptr, key_scales_ptr,
    value_scales_ptr, kv_head, table_ptr, key_page_stride, key_token_stride, value_page_stride,
    value_token_stride, scale_log2, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, IS_LATENT: tl.constexpr,
    SPLIT: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) of one split, from an empty state -> m [M], z [M], o [M, V], not divided.

    `begin` is a multiple of BLOCK_N. `position_M` and `first_M` bound what each row sees. The pages
    begin at one key/value head.
    """
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    at_D, at_R, at_V = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    for start in tl.range(begin, end, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        page_N = tl.load(table_ptr + key_N // PAGE).to(tl.int64)
        slot_N = key_N % PAGE
        is_key_N = (key_N < end)[:, None]
        key_rows = keys_ptr + page_N * key_page_stride + slot_N * key_token_stride
        scale_row = (page_N * NUM_KV_HEADS + kv_head) * PAGE + slot_N
        is_head = is_key_N & (at_D < HEAD_DIM)[None, :] if BLOCK_D > HEAD_DIM else is_key_N
        k_ND = load_rows(
            key_rows, at_D, is_head, key_scales_ptr, scale_row, is_key_N,
            q_MD.dtype, HEAD_DIM, SPLIT, BITS, SCALES,
        )  # fmt: skip
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if BLOCK_D < HEAD_DIM:
            is_rest = is_key_N & (BLOCK_D + at_R < HEAD_DIM)
            k_NR = load_rows(
                key_rows, BLOCK_D + at_R, is_rest, key_scales_ptr, scale_row, is_key_N,
                q_MD.dtype, HEAD_DIM, SPLIT, BITS, SCALES,
            )  # fmt: skip
            s_MN = tl.dot(q_MR, tl.trans(k_NR), s_MN, input_precision="ieee")
        is_visible = key_N[None, :] <= position_M[:, None]
        if WINDOW > 0 or CHUNK > 0:
            is_visible &= key_N[None, :] >= first_M[:, None]
        s_MN = tl.where(is_visible, s_MN, float("-inf"))
        m_next = tl.maximum(m, tl.max(s_MN, 1) * scale_log2)
        top = tl.where(m_next == float("-inf"), 0.0, m_next)  # nothing seen yet
        p_MN = tl.exp2(tl.fma(s_MN, scale_log2, -top[:, None]))
        old = tl.exp2(m - top)
        z = tl.fma(z, old, tl.sum(p_MN, 1))
        o = o * old[:, None]
        if IS_LATENT:  # the values are the keys' first part, which is here already
            o = tl.dot(p_MN.to(k_ND.dtype), k_ND, o, input_precision="ieee")
        else:
            value_rows = values_ptr + page_N * value_page_stride + slot_N * value_token_stride
            is_value = is_key_N & (at_V < VALUE_DIM)[None, :]
            v_NV = load_rows(
                value_rows, at_V, is_value, value_scales_ptr, scale_row, is_key_N,
                q_MD.dtype, VALUE_DIM, VALUE_DIM, BITS, SCALES,
            )  # fmt: skip
            o = tl.dot(p_MN.to(v_NV.dtype), v_NV, o, input_precision="ieee")
        m = m_next
    return m, z, o


@triton.jit
def _start(sinks_ptr, head_M, is_row_M, BLOCK_M: tl.constexpr):
    """(m, z) before any split: nothing, or the sink's logit, whose value is zero."""
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head_M, mask=is_row_M, other=0.0) * LOG2_E
        z = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        z = tl.zeros((BLOCK_M,), tl.float32)
    return m, z


@triton.jit
def _store_rows(
    out_ptr, o, z, token_M, head_M, is_row_M, token_stride, head_stride, VALUE_DIM: tl.constexpr
):  # fmt: skip
    """Divide, round, store."""
    at_V = tl.arange(0, o.shape[1])[None, :]
    out = out_ptr + (token_M * token_stride + head_M * head_stride)[:, None] + at_V
    o = (o / z[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out, o, mask=is_row_M[:, None] & (at_V < VALUE_DIM))


@triton.jit(
    do_not_specialize=["partial_rows"],
    do_not_specialize_on_alignment=["tiles_ptr", "items_ptr"],
)
def attend_items(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tiles_ptr, items_ptr, tables_ptr,
    partial_ptr, stats_ptr, partial_rows, table_stride, q_token_stride, q_head_stride,
    key_page_stride, key_head_stride, key_token_stride,
    value_page_stride, value_head_stride, value_token_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, IS_LATENT: tl.constexpr,
    SPLIT: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, PAGE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One program: one (tile, split) pair and up to BLOCK_HEADS query heads of one key/value head.

    Grid: items x Hkv x head blocks. items [I, 2]: tile (-1: none) and split. Writes, for its own
    rows, partial [I, Hkv x head blocks, partial_rows, Dv] and stats [I, .., partial_rows, 2] (m, z)
    in fp32. Order of sums: the split's blocks, ascending.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    HEAD_PROGRAMS: tl.constexpr = NUM_KV_HEADS * HEAD_BLOCKS
    program = tl.program_id(0)
    item = program // HEAD_PROGRAMS
    kv_head, head_block = program % HEAD_PROGRAMS // HEAD_BLOCKS, program % HEAD_BLOCKS
    tile = tl.load(items_ptr + 2 * item)
    if tile < 0:
        return
    split = tl.load(items_ptr + 2 * item + 1)
    tile_ptr = tiles_ptr + tile * TILE_FIELDS
    sequence, first_token = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    num_tokens, first_position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    token_M, head_M, is_row_M, at_M = rows_of(
        first_token, num_tokens, kv_head, head_block, GROUP, BLOCK_HEADS, BLOCK_M
    )
    q_MD, q_MR = load_q(
        q_ptr, token_M, head_M, q_token_stride, q_head_stride,
        (q_ptr if BITS > 0 else keys_ptr).dtype.element_ty, HEAD_DIM, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    position_M = first_position + at_M
    lowest = first_visible(first_position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    m, z, o = _attend_split(
        q_MD, q_MR, position_M, first_visible(position_M, WINDOW, CHUNK),
        tl.maximum(split * SPLIT_TOKENS, lowest),
        tl.minimum((split + 1) * SPLIT_TOKENS, first_position + num_tokens),
        keys_ptr + kv_head * key_head_stride, values_ptr + kv_head * value_head_stride,
        key_scales_ptr, value_scales_ptr, kv_head,
        tables_ptr + sequence * table_stride,
        key_page_stride, key_token_stride, value_page_stride, value_token_stride, scale_log2,
        NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, WINDOW, CHUNK, IS_LATENT, SPLIT, BITS, SCALES,
        PAGE,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R, BLOCK_V,
    )  # fmt: skip
    row_M = program.to(tl.int64) * partial_rows + tl.arange(0, BLOCK_M)
    tl.store(stats_ptr + 2 * row_M, m, mask=is_row_M)
    tl.store(stats_ptr + 2 * row_M + 1, z, mask=is_row_M)
    at_V = tl.arange(0, BLOCK_V)[None, :]
    is_stored = is_row_M[:, None] & (at_V < VALUE_DIM)
    tl.store(partial_ptr + row_M[:, None] * VALUE_DIM + at_V, o, mask=is_stored)


@triton.jit(
    do_not_specialize=["partial_rows", "row_blocks"],
    do_not_specialize_on_alignment=["tiles_ptr"],
)
def join_items(
    partial_ptr, stats_ptr, tiles_ptr, sinks_ptr, out_ptr, partial_rows, row_blocks,
    out_token_stride, out_head_stride, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one tile; joins its items, divides, rounds, stores.

    Grid: tiles x Hkv x head blocks x row_blocks. `sinks_ptr` [H] in fp32 or None. Order of sums:
    the sink, then the splits, ascending.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    HEAD_PROGRAMS: tl.constexpr = NUM_KV_HEADS * HEAD_BLOCKS
    program = tl.program_id(0)
    tile = program // (HEAD_PROGRAMS * row_blocks)
    head_program = program // row_blocks % HEAD_PROGRAMS
    kv_head, head_block = head_program // HEAD_BLOCKS, head_program % HEAD_BLOCKS
    tile_ptr = tiles_ptr + tile * TILE_FIELDS
    num_tokens = tl.load(tile_ptr + 2)
    first_row = program % row_blocks * BLOCK_ROWS
    if first_row >= num_tokens * BLOCK_HEADS:
        return
    row_M = first_row + tl.arange(0, BLOCK_ROWS)
    at_head_M = head_block * BLOCK_HEADS + row_M % BLOCK_HEADS
    is_row_M = (row_M < num_tokens * BLOCK_HEADS) & (at_head_M < GROUP)
    token_M = (tl.load(tile_ptr + 1) + row_M // BLOCK_HEADS).to(tl.int64)
    head_M = kv_head * GROUP + at_head_M
    at_V = tl.arange(0, BLOCK_V)[None, :]
    is_value = is_row_M[:, None] & (at_V < VALUE_DIM)
    m, z = _start(sinks_ptr, head_M, is_row_M, BLOCK_ROWS)
    o = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    first_item = tl.load(tile_ptr + 4)
    for item in tl.range(first_item, first_item + tl.load(tile_ptr + 5)):
        part_M = (item * HEAD_PROGRAMS + head_program).to(tl.int64) * partial_rows + row_M
        m_split = tl.load(stats_ptr + 2 * part_M, mask=is_row_M, other=0.0)
        z_split = tl.load(stats_ptr + 2 * part_M + 1, mask=is_row_M, other=1.0)
        at_part = partial_ptr + part_M[:, None] * VALUE_DIM + at_V
        o_split = tl.load(at_part, mask=is_value, other=0.0)
        m, z, old, new = _join_sums(m, z, m_split, z_split)
        o = _join_values(o, o_split, old, new)
    _store_rows(
        out_ptr, o, z, token_M, head_M, is_row_M, out_token_stride, out_head_stride, VALUE_DIM
    )


@triton.jit(do_not_specialize=["num_tiles"])
def attend_tiles(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tiles_ptr, tables_ptr, sinks_ptr,
    out_ptr, num_tiles, table_stride, q_token_stride, q_head_stride,
    key_page_stride, key_head_stride, key_token_stride,
    value_page_stride, value_head_stride, value_token_stride, out_token_stride, out_head_stride,
    scale_log2, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    IS_LATENT: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr,
    PAGE: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One program: a tile against all its splits, ascending, and up to BLOCK_HEADS query heads.

    Grid: Hkv x head blocks x tiles; neighbours share keys and values. Empty tiles are skipped.
    `sinks_ptr` [H] in fp32 or None. Order of sums: the sink, then the splits, ascending.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    head_program = program // num_tiles
    kv_head, head_block = head_program // HEAD_BLOCKS, head_program % HEAD_BLOCKS
    tile_ptr = tiles_ptr + program % num_tiles * TILE_FIELDS
    sequence, first_token = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    num_tokens, first_position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    if num_tokens == 0:
        return
    token_M, head_M, is_row_M, at_M = rows_of(
        first_token, num_tokens, kv_head, head_block, GROUP, BLOCK_HEADS, BLOCK_M
    )
    q_MD, q_MR = load_q(
        q_ptr, token_M, head_M, q_token_stride, q_head_stride,
        (q_ptr if BITS > 0 else keys_ptr).dtype.element_ty, HEAD_DIM, BLOCK_D, BLOCK_R,
    )  # fmt: skip
    position_M = first_position + at_M
    first_M = first_visible(position_M, WINDOW, CHUNK)
    m, z = _start(sinks_ptr, head_M, is_row_M, BLOCK_M)
    o = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    lowest = first_visible(first_position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    length = first_position + num_tokens
    first_split = lowest // SPLIT_TOKENS
    for split in tl.range(first_split, (length + SPLIT_TOKENS - 1) // SPLIT_TOKENS):
        m_split, z_split, o_split = _attend_split(
            q_MD, q_MR, position_M, first_M,
            tl.maximum(split * SPLIT_TOKENS, lowest),
            tl.minimum((split + 1) * SPLIT_TOKENS, length),
            keys_ptr + kv_head * key_head_stride, values_ptr + kv_head * value_head_stride,
            key_scales_ptr, value_scales_ptr, kv_head,
            tables_ptr + sequence * table_stride,
            key_page_stride, key_token_stride, value_page_stride, value_token_stride, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, WINDOW, CHUNK, IS_LATENT, SPLIT, BITS, SCALES,
            PAGE,
            BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_R, BLOCK_V,
        )  # fmt: skip
        m, z, old, new = _join_sums(m, z, m_split, z_split)
        o = _join_values(o, o_split, old, new)
    _store_rows(
        out_ptr, o, z, token_M, head_M, is_row_M, out_token_stride, out_head_stride, VALUE_DIM
    )
