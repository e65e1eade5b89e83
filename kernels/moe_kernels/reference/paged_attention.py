"""Causal attention of a step's query rows over paged keys and values, in fp32.

T query tokens, H query heads, Hkv key/value heads, D head width. The cache of one layer is
[num_pages, Hkv, page_size, D] for keys and the same for values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.reference.attention_plan import BLOCK_TOKENS, AttentionPlan, AttentionSegment

_VALUE_MULTIPLE = 8  # in products of fewer columns (5, 10) a CPU's sums depend on the row's place


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over each token's visible keys -> [T, H, Dv] in fp32.

    Keys and values of the step's own tokens must be in the cache already. A sink is one more logit
    of its head's softmax, without a value.
    """
    shape = (*q_THD.shape[:2], v_cache.shape[-1])
    out_THD = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    scaled_THD = q_THD.float() * scale
    for segment in plan.segments:
        rows = _attend(scaled_THD, k_cache, v_cache, segment, sinks_H)
        out_THD.index_copy_(0, segment.output_tokens, rows.index_select(0, segment.outputs))
    return out_THD


def _attend(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    segment: AttentionSegment,
    sinks_H: Tensor | None,
) -> Tensor:
    """One segment -> [N * Q, H, Dv]. Blocks are joined by the usual (max, sum, output) algebra,
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
    sinks_HR = None
    if sinks_H is not None:  # [Hkv, R]: the rows of a tile are token-major
        sinks_HR = sinks_H.view(num_kv_heads, group).repeat(1, tokens)
        top = torch.maximum(top, sinks_HR)
    # A row that sees nothing of any block cannot occur: every token sees itself.
    scores.sub_(top.index_select(0, segment.pair_tile_P).unsqueeze(-1)).exp_()
    total = _join(scores.sum(-1), segment.tiles_by_block, torch.add)
    if sinks_HR is not None:
        total = total + torch.exp(sinks_HR - top)
    values = _gather(v_cache, segment.page_rows, num_pairs)
    values = F.pad(values, (0, -values.shape[-1] % _VALUE_MULTIPLE))
    out = torch.bmm(scores.view(-1, num_rows, BLOCK_TOKENS), values)[..., : v_cache.shape[-1]]
    out = out.reshape(num_pairs, num_kv_heads, num_rows, -1)
    out = _join(out, segment.tiles_by_block, torch.add) / total.unsqueeze(-1)
    out = out.view(num_tiles, num_kv_heads, tokens, group, -1).transpose(1, 2)
    return out.reshape(num_tiles * tokens, num_heads, -1)


def _gather(cache: Tensor, page_rows: Tensor, num_pairs: int) -> Tensor:
    """The blocks' keys or values, [P * Hkv, 128, D] in fp32."""
    num_kv_heads, width = cache.shape[1], cache.shape[3]
    rows = cache.flatten(0, 1).index_select(0, page_rows)  # latent values lie in strided rows
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
