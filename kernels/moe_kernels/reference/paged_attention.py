"""Causal attention over paged keys and values in fp32: the plan of a step, which every layer uses,
and its arithmetic.

Query tokens are cut into tiles of one sequence each, keys into blocks of 128 tokens that start at
multiples of 128. A (tile, block) pair is one matrix product of a fixed shape, so a row's arithmetic
depends on its own sequence only: that is what makes attention row-invariant.

    sequence 0, tokens 130..133 of 134           sequence 1, token 5 (decode)
      tile A = 130..133  -> blocks 0, 1            tile B = 5  -> block 0
      tiles by falling number of blocks: A, B; pairs by block: (A,0) (B,0) | (A,1)

Small tiles serve decode rows, large ones prefill chunks; both have a multiple of 8 rows. T query
tokens, H query heads, Hkv key/value heads, D head width. The cache of one layer is [num_pages, Hkv,
page_size, D] for keys and the same for values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.attention_shape import AttentionShape, StepRows
from moe_kernels.reference.torch_kv_rows import QuantisedRows

BLOCK_TOKENS = 128
_LARGE_TILE_TOKENS = 32
_MAX_SCORES = 16 * 2**20  # scores of one segment over all heads: 64 MiB in fp32

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Tiles of one size, longest first, and their pairs ordered by block.

    N tiles, Q tokens per tile, P pairs, R = Q * group rows, B block tokens. All on the device.
    """

    tokens_N_Q: Tensor  # int64 [N * Q]: index of each query token in the step (padding repeats)
    outputs: Tensor  # int64 [T']: where in [N * Q] the real tokens are
    output_tokens: Tensor  # int64 [T']: their index in the step
    pair_tile_P: Tensor  # int64 [P]
    page_rows: Tensor  # int64 [P * Hkv * pages per block]: rows of the cache seen as [pages * Hkv]
    mask_P1RB: Tensor  # bool [P, 1, R, B]: True where a query must not look
    tiles_by_block: tuple[int, ...]  # how many tiles have block j: the first ones
    tile_tokens: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All segments of a step."""

    segments: tuple[AttentionSegment, ...]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles before they are sorted: one entry each."""

    sequence: Ints
    first_token: Ints  # index in the step
    first_position: Ints
    num_tokens: Ints


def plan_attention(step: StepRows, shape: AttentionShape, device: torch.device) -> AttentionPlan:
    """Plans a step. Page 0 is the empty page and stands for "none" in the tables."""
    query_lens, query_starts = step.query_lens, step.query_starts
    num_heads, group = shape.num_heads, shape.group
    small = 8 // math.gcd(8, group)
    large = small * max(1, _LARGE_TILE_TOKENS // small)
    offsets = np.concatenate(([0], np.cumsum(query_lens)[:-1]))
    assert BLOCK_TOKENS % step.page_size == 0, f"pages of {step.page_size} tokens"
    pages_per_block = BLOCK_TOKENS // step.page_size
    tables = _pad_tables(step.page_tables, pages_per_block)
    segments = []
    for tile_tokens, chosen in ((small, query_lens <= small), (large, query_lens > small)):
        if not chosen.any():
            continue
        tiles = _cut(query_lens, offsets, query_starts, np.flatnonzero(chosen), tile_tokens)
        limit = max(1, _MAX_SCORES // (tile_tokens * num_heads * BLOCK_TOKENS))
        for part in _split_by_pairs(_sort_by_blocks(tiles), limit):
            segments.append(_segment(part, tile_tokens, tables, pages_per_block, shape, device))
    return AttentionPlan(tuple(segments))


def _pad_tables(page_tables: Sequence[Sequence[int]], multiple: int) -> Ints:
    longest = max(len(table) for table in page_tables)
    padded = np.zeros((len(page_tables), -(-longest // multiple) * multiple), dtype=np.int64)
    for row, table in zip(padded, page_tables, strict=True):
        row[: len(table)] = table
    return padded


def _cut(lens: Ints, offsets: Ints, starts: Ints, chosen: Ints, tile_tokens: int) -> _Tiles:
    counts = -(-lens[chosen] // tile_tokens)
    sequence = np.repeat(chosen, counts)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * tile_tokens
    return _Tiles(
        sequence,
        offsets[sequence] + first,
        starts[sequence] + first,
        np.minimum(lens[sequence] - first, tile_tokens),
    )


def _num_blocks(tiles: _Tiles) -> Ints:
    blocks: Ints = (tiles.first_position + tiles.num_tokens - 1) // BLOCK_TOKENS + 1
    return blocks


def _take(tiles: _Tiles, index: Ints | slice) -> _Tiles:
    return _Tiles(
        tiles.sequence[index],
        tiles.first_token[index],
        tiles.first_position[index],
        tiles.num_tokens[index],
    )


def _sort_by_blocks(tiles: _Tiles) -> _Tiles:
    return _take(tiles, np.argsort(-_num_blocks(tiles), kind="stable"))


def _split_by_pairs(tiles: _Tiles, limit: int) -> list[_Tiles]:
    """Runs of tiles with at most `limit` pairs each (a single tile may exceed it)."""
    parts, start, pairs = [], 0, 0
    for index, blocks in enumerate(_num_blocks(tiles).tolist()):
        if pairs and pairs + blocks > limit:
            parts.append(_take(tiles, slice(start, index)))
            start, pairs = index, 0
        pairs += blocks
    parts.append(_take(tiles, slice(start, None)))
    return parts


def _segment(
    tiles: _Tiles,
    tile_tokens: int,
    tables: Ints,
    pages_per_block: int,
    shape: AttentionShape,
    device: torch.device,
) -> AttentionSegment:
    num_tiles = len(tiles.sequence)
    within = np.minimum(np.arange(tile_tokens)[None], tiles.num_tokens[:, None] - 1)
    tokens = (tiles.first_token[:, None] + within).reshape(-1)
    is_real = np.arange(tile_tokens)[None] < tiles.num_tokens[:, None]
    outputs = np.flatnonzero(is_real)
    blocks = _num_blocks(tiles)
    by_block = [int((blocks > j).sum()) for j in range(int(blocks[0]))]
    pair_tile = np.concatenate([np.arange(n) for n in by_block])
    pair_block = np.repeat(np.arange(len(by_block)), by_block)
    columns = pair_block[:, None] * pages_per_block + np.arange(pages_per_block)[None]
    pages = tables[tiles.sequence[pair_tile][:, None], columns]
    rows = pages[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)[None, :, None]
    positions = tiles.first_position[:, None] + within
    keys = pair_block[:, None, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)[None, None]
    queries = np.repeat(positions[pair_tile], shape.group, axis=1)[:, :, None]
    mask = keys > queries
    if shape.sliding_window is not None:
        mask |= keys <= queries - shape.sliding_window
    if shape.chunk is not None:
        mask |= keys < queries // shape.chunk * shape.chunk
    assert num_tiles * tile_tokens == len(tokens), "every tile has the same number of tokens"
    return AttentionSegment(
        tokens_N_Q=_to(tokens, device),
        outputs=_to(outputs, device),
        output_tokens=_to(tokens[outputs], device),
        pair_tile_P=_to(pair_tile, device),
        page_rows=_to(rows.reshape(-1), device),
        mask_P1RB=_to(mask[:, None], device),
        tiles_by_block=tuple(by_block),
        tile_tokens=tile_tokens,
    )


def _to(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


_VALUE_MULTIPLE = 8  # in products of fewer columns (5, 10) a CPU's sums depend on the row's place


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor | QuantisedRows,
    v_cache: Tensor | QuantisedRows,
    plan: AttentionPlan,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over each token's visible keys -> [T, H, Dv] in fp32.

    Keys and values of the step's own tokens must be in the cache already. A sink is one more logit
    of its head's softmax, without a value.
    """
    shape = (*q_THD.shape[:2], _width(v_cache))
    out_THD = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    scaled_THD = q_THD.float() * scale
    for segment in plan.segments:
        rows = _attend(scaled_THD, k_cache, v_cache, segment, sinks_H)
        out_THD.index_copy_(0, segment.output_tokens, rows.index_select(0, segment.outputs))
    return out_THD


def _attend(
    q_THD: Tensor,
    k_cache: Tensor | QuantisedRows,
    v_cache: Tensor | QuantisedRows,
    segment: AttentionSegment,
    sinks_H: Tensor | None,
) -> Tensor:
    """One segment -> [N * Q, H, Dv]. Blocks are joined by the usual (max, sum, output) algebra,
    block after block: a tile's sums never see another tile, nor a block that it does not have."""
    num_heads, width = q_THD.shape[1:]
    num_kv_heads = (k_cache if isinstance(k_cache, Tensor) else k_cache.numbers).shape[1]
    group, tokens = num_heads // num_kv_heads, segment.tile_tokens
    num_pairs = len(segment.pair_tile_P)
    num_rows = tokens * group
    q = q_THD.index_select(0, segment.tokens_N_Q)
    q = q.view(-1, tokens, num_kv_heads, group, width).transpose(1, 2).contiguous()
    num_tiles = q.shape[0]
    q = q.view(num_tiles, num_kv_heads, num_rows, width).index_select(0, segment.pair_tile_P)
    keys = _gather(k_cache, segment.page_rows)
    scores = torch.bmm(q.view(-1, num_rows, width), keys.transpose(1, 2))
    scores = scores.view(num_pairs, num_kv_heads, num_rows, BLOCK_TOKENS)
    scores.masked_fill_(segment.mask_P1RB, float("-inf"))
    top = _join(scores.amax(-1), segment.tiles_by_block, torch.maximum)
    sinks_HR = None
    if sinks_H is not None:  # [Hkv, R]: the rows of a tile are token-major
        sinks_HR = sinks_H.view(num_kv_heads, group).repeat(1, tokens)
        top = torch.maximum(top, sinks_HR)
    # A row that sees nothing of any block cannot occur: every token sees itself.
    scores.sub_(top.index_select(0, segment.pair_tile_P).unsqueeze(-1)).exp_()
    total = _join(scores.sum(-1), segment.tiles_by_block, torch.add)
    if sinks_HR is not None:
        total = total + torch.exp(sinks_HR - top)
    values = _gather(v_cache, segment.page_rows)
    values = F.pad(values, (0, -values.shape[-1] % _VALUE_MULTIPLE))
    out = torch.bmm(scores.view(-1, num_rows, BLOCK_TOKENS), values)[..., : _width(v_cache)]
    out = out.reshape(num_pairs, num_kv_heads, num_rows, -1)
    out = _join(out, segment.tiles_by_block, torch.add) / total.unsqueeze(-1)
    out = out.view(num_tiles, num_kv_heads, tokens, group, -1).transpose(1, 2)
    return out.reshape(num_tiles * tokens, num_heads, -1)


def _width(rows: Tensor | QuantisedRows) -> int:
    return rows.shape[-1] if isinstance(rows, Tensor) else rows.width


def _gather(cache: Tensor | QuantisedRows, page_rows: Tensor) -> Tensor:
    """Returns the blocks' keys or values, [P * Hkv, 128, D] in fp32."""

    def taken(part: Tensor) -> Tensor:
        rows = part.flatten(0, 1).index_select(0, page_rows)  # latent values lie in strided rows
        return rows.view(-1, BLOCK_TOKENS, part.shape[3])

    if isinstance(cache, Tensor):
        return taken(cache).float()
    return replace(cache, numbers=taken(cache.numbers), scales=taken(cache.scales)).floats()


def _join(parts: Tensor, tiles_by_block: tuple[int, ...], combine: Callable[..., Tensor]) -> Tensor:
    """Folds the pairs of each tile, in block order: [P, ...] -> [N, ...]."""
    start = tiles_by_block[0]
    joined = parts[:start]
    for count in tiles_by_block[1:]:
        combine(joined[:count], parts[start : start + count], out=joined[:count])
        start += count
    return joined


def paged_attention_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: list[int],
    first_position: int,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The definition for one sequence, in float64."""
    num_kv_heads = k_cache.shape[1]
    num_tokens, num_heads, _ = q_THD.shape
    length = first_position + num_tokens
    keys, values = (
        c[page_table].transpose(1, 2).reshape(-1, num_kv_heads, c.shape[-1])[:length].double()
        for c in (k_cache, v_cache)
    )
    keys, values = (t.repeat_interleave(num_heads // num_kv_heads, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q_THD.double(), keys) * scale
    queries, positions = torch.arange(first_position, length)[:, None], torch.arange(length)[None]
    is_hidden = positions > queries
    if sliding_window is not None:
        is_hidden |= positions <= queries - sliding_window
    if chunk is not None:
        is_hidden |= positions < queries // chunk * chunk
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks_H is not None:
        column = sinks_H.double()[:, None, None].expand(-1, num_tokens, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, values)
