"""Chooses the tiles for an attention shape, from the shape of the weights only.

Nothing here knows the batch or the lengths of its sequences; that is half of row invariance. The
other half is that a row of decode and the same row of a prefill chunk use the same tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_MIN_BLOCK = 16  # the least that a matrix instruction takes
_JOINED_VALUES = 1024  # of one program
_JOIN_COLUMNS = 64
_FULL_CARD = 128  # programs
_WIDE = 256  # values of a row from which on two accumulators do not fit into the registers


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTile:
    """BLOCK_M rows are `tile_tokens` tokens x `block_heads` query heads of one key/value head."""

    block_m: int
    block_n: int
    block_heads: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """`items` serves pairs of tile and split, `tiles` a tile against all its splits; None: pairs
    serve everything. Sequences with at most `max_item_tokens` query tokens are cut into pairs.
    Tiles join their splits in registers, or `join_columns` at once in a scratch (0: registers).

    A head's width is `block_d` and up to `block_r` more; values have up to `block_v`.
    """

    split_tokens: int
    block_d: int
    block_r: int
    block_v: int
    items: AttentionTile
    tiles: AttentionTile | None
    join_columns: int
    max_item_tokens: int
    head_blocks: int  # programs per key/value head
    join_rows: int  # of one program of join_items


def attention_config(
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    element_bytes: int,
    chip: int,
) -> AttentionConfig:
    """Returns the tiles for pages of this shape; `element_bytes` of a key, `chip` the major part of
    the compute capability. Only 9 and 10 have matrix instructions for whole warp groups."""
    block_d = max(_MIN_BLOCK, _power_of_two_below(head_dim))
    block_v = max(_MIN_BLOCK, _power_of_two_above(value_dim))
    width = max(head_dim, value_dim)
    is_wide = width > _WIDE
    block_m, block_n, num_warps, num_stages = _tile(width, element_bytes, chip in (9, 10))
    head_blocks = -(-group // block_m)
    block_heads = -(-group // head_blocks)
    tile = AttentionTile(
        block_m=block_m,
        block_n=block_n,
        block_heads=block_heads,
        tile_tokens=block_m // block_heads,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    # The number of stages orders loads, not sums: it is all that the two may differ in.
    whole = replace(tile, num_stages=1) if chip == 10 and width > 192 else tile
    # Few heads need short splits to occupy a card with few sequences. A wide row's partial result
    # costs as much traffic as hundreds of its keys, so its splits stay long.
    split_tokens = 256 if num_kv_heads * head_blocks <= 4 and not is_wide else 512
    # A wide tile walks over its splits alone, so there must be one for each processor.
    most_tiles = _FULL_CARD // (num_kv_heads * head_blocks)
    return AttentionConfig(
        split_tokens=split_tokens,
        block_d=block_d,
        block_r=max(_MIN_BLOCK, _power_of_two_above(head_dim - block_d)),
        block_v=block_v,
        items=tile,
        # With tcgen05 the loop over splits spills, also where it joins in a scratch.
        tiles=None if is_wide and chip == 10 else tile if is_wide else whole,
        join_columns=_JOIN_COLUMNS if is_wide else 0,
        max_item_tokens=tile.tile_tokens * max(4, most_tiles if is_wide else 0),
        head_blocks=head_blocks,
        join_rows=max(1, _JOINED_VALUES // block_v),
    )


def _tile(width: int, element_bytes: int, has_wgmma: bool) -> tuple[int, int, int, int]:
    """Returns the rows, keys, warps and stages. 64 rows are what one warp group's wgmma takes; the
    rest is what leaves both kernels without spills (see compile_cases.py), and where there is no
    wgmma fits into 99 KiB of shared memory. Not yet tuned on a GPU."""
    if element_bytes > 2:  # fp32 has no matrix instruction that keeps its precision
        return 16, 32, 4, 1
    if width > _WIDE:
        return (64, 32, 8, 2) if has_wgmma else (32, 32, 8, 2)
    if width > 128:
        return 64, 32, 8, 2
    if width > 64:
        return (64, 32, 4, 3) if has_wgmma else (64, 64, 8, 2)
    return 64, 64, 4, 3 if has_wgmma else 2


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _power_of_two_above(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
