# mypy: disable-error-code="no-untyped-def"
"""The rows of a program: the queries of its tile, the keys that they see, and rows out of pages.

M rows of a tile, N keys of a block, D and R two parts of a head's width.
"""

import triton
import triton.language as tl


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at `position` sees; 0 stands for no window or chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - (WINDOW - 1))
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def rows_of(
    first_token,
    num_tokens,
    kv_head,
    head_block,
    GROUP: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The tile's rows, token-major -> step token, query head, whether it is one, token in the tile.

    Rows beyond the tile repeat its last token or head: they compute something, and store nothing.
    """
    row_M = tl.arange(0, BLOCK_M)
    token_M = row_M // BLOCK_HEADS
    head_M = head_block * BLOCK_HEADS + row_M % BLOCK_HEADS
    is_row_M = (token_M < num_tokens) & (head_M < GROUP)
    token_M = tl.minimum(token_M, num_tokens - 1)
    head_M = kv_head * GROUP + tl.minimum(head_M, GROUP - 1)
    return (first_token + token_M).to(tl.int64), head_M, is_row_M, token_M


@triton.jit
def load_q(
    q_ptr, token_M, head_M, token_stride, head_stride, DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The two parts of the queries, in the pages' dtype. Without a rest the second is the first."""
    at_D, at_R = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    rows = (q_ptr + token_M * token_stride + head_M * head_stride)[:, None]
    q_MD = tl.load(rows + at_D, mask=(at_D < HEAD_DIM)[None, :], other=0.0).to(DTYPE)
    q_MR = q_MD
    if BLOCK_D < HEAD_DIM:
        is_rest = (BLOCK_D + at_R < HEAD_DIM)[None, :]
        q_MR = tl.load(rows + BLOCK_D + at_R, mask=is_rest, other=0.0).to(DTYPE)
    return q_MD, q_MR


@triton.jit
def load_rows(
    rows_N, at, is_there, scales_ptr, scale_row_N, is_key_N1, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, SPLIT: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Values `at` of rows of WIDTH values, in DTYPE. In 8 bits values from SPLIT on have the second
    scale; in 4 bits the second is the zero (moe_kernels/reference/torch_kv_rows.py)."""
    if BITS == 0:
        x = tl.load(rows_N[:, None] + at, mask=is_there, other=0.0)
    else:
        first_N1, second_N1 = _load_scales(scales_ptr, scale_row_N, is_key_N1, SCALES)
        if BITS == 8:
            numbers = tl.load(rows_N[:, None] + at, mask=is_there, other=0).to(tl.float32)
            x = (numbers * tl.where(at[None, :] < SPLIT, first_N1, second_N1)).to(DTYPE)
        else:
            HALF: tl.constexpr = WIDTH // 2
            byte = tl.load(rows_N[:, None] + at % HALF, mask=is_there, other=0).to(tl.int32)
            number = tl.where(at[None, :] < HALF, byte & 15, byte >> 4).to(tl.float32)
            x = tl.where(is_there, (number - 8.0) * first_N1 + second_N1, 0.0).to(DTYPE)
    return x


@triton.jit
def _load_scales(scales_ptr, row_N, is_key_N1, SCALES: tl.constexpr):
    """The first and the second scale of rows, [N, 1] in fp32; one scale is both."""
    at = scales_ptr + row_N[:, None] * SCALES
    first_N1 = tl.load(at, mask=is_key_N1, other=0.0).to(tl.float32)
    if SCALES == 2:
        second_N1 = tl.load(at + 1, mask=is_key_N1, other=0.0).to(tl.float32)
    else:
        second_N1 = first_N1
    return first_N1, second_N1
