"""Causal attention of a step's query rows over paged keys and values, in fp32.

T query tokens, H query heads, Hkv key/value heads, D head width. The cache of one layer is
[num_pages, Hkv, page_size, D] for keys and the same for values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.attention_plan import BLOCK_TOKENS, AttentionPlan, AttentionSegment


def paged_attention(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """softmax(scale * q k^T) v over each token's visible keys -> [T, H, D] in fp32.

    Keys and values of the step's own tokens must be in the cache already.
    """
    out_THD = torch.empty(q_THD.shape, dtype=torch.float32, device=q_THD.device)
    scaled_THD = q_THD.float() * scale
    for segment in plan.segments:
        rows = _attend(scaled_THD, k_cache, v_cache, segment)
        out_THD.index_copy_(0, segment.output_tokens, rows.index_select(0, segment.outputs))
    return out_THD


def _attend(q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, segment: AttentionSegment) -> Tensor:
    """One segment -> [N * Q, H, D]. Blocks are joined by the usual (max, sum, output) algebra,
    block after block: a tile's sums never see another tile, nor a block that it does not have."""
    num_kv_heads, width = k_cache.shape[1], k_cache.shape[3]
    num_heads = q_THD.shape[1]
    group, tokens = num_heads // num_kv_heads, segment.tile_tokens
    num_pairs = len(segment.pair_tile_P)
    num_rows = tokens * group
    q = q_THD.index_select(0, segment.tokens_N_Q)
    q = q.view(-1, tokens, num_kv_heads, group, width).transpose(1, 2).contiguous()
    num_tiles = q.shape[0]
    q = q.view(num_tiles, num_kv_heads, num_rows, width).index_select(0, segment.pair_tile_P)
    keys = _gather(k_cache, segment.page_rows, num_pairs)
    scores = torch.bmm(q.view(-1, num_rows, width), keys.transpose(1, 2))
    scores = scores.view(num_pairs, num_kv_heads, num_rows, BLOCK_TOKENS)
    scores.masked_fill_(segment.mask_P1RB, float("-inf"))
    top = _join(scores.amax(-1), segment.tiles_by_block, torch.maximum)
    # A row that sees nothing of any block cannot occur: every token sees itself.
    scores.sub_(top.index_select(0, segment.pair_tile_P).unsqueeze(-1)).exp_()
    total = _join(scores.sum(-1), segment.tiles_by_block, torch.add)
    values = _gather(v_cache, segment.page_rows, num_pairs)
    out = torch.bmm(scores.view(-1, num_rows, BLOCK_TOKENS), values)
    out = out.view(num_pairs, num_kv_heads, num_rows, width)
    out = _join(out, segment.tiles_by_block, torch.add) / total.unsqueeze(-1)
    out = out.view(num_tiles, num_kv_heads, tokens, group, width).transpose(1, 2)
    return out.reshape(-1, num_heads, width)


def _gather(cache: Tensor, page_rows: Tensor, num_pairs: int) -> Tensor:
    """The blocks' keys or values, [P * Hkv, 128, D] in fp32."""
    num_pages, num_kv_heads, page_size, width = cache.shape
    rows = cache.view(num_pages * num_kv_heads, page_size * width).index_select(0, page_rows)
    return rows.view(num_pairs * num_kv_heads, BLOCK_TOKENS, width).float()


def _join(parts: Tensor, tiles_by_block: tuple[int, ...], combine: Callable[..., Tensor]) -> Tensor:
    """Fold the pairs of each tile, in block order: [P, ...] -> [N, ...]."""
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
) -> Tensor:
    """The definition for one sequence, in float64."""
    num_kv_heads, page_size, width = k_cache.shape[1:]
    num_tokens, num_heads, _ = q_THD.shape
    length = first_position + num_tokens
    keys, values = (
        c[page_table].transpose(1, 2).reshape(-1, num_kv_heads, width)[:length].double()
        for c in (k_cache, v_cache)
    )
    keys, values = (t.repeat_interleave(num_heads // num_kv_heads, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q_THD.double(), keys) * scale
    queries = torch.arange(first_position, length)[:, None]
    is_hidden = torch.arange(length)[None] > queries
    if sliding_window is not None:
        is_hidden |= torch.arange(length)[None] <= queries - sliding_window
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
