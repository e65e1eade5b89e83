"""Prepares the new tokens for attention in one kernel: norm, rotation, and writing to the cache.

T tokens, H query heads, Hkv key/value heads, D head width, Dv value width, L latent, R rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.gpu.heads.heuristics import head_config
from moe_kernels.gpu.heads.kernel import shape_heads, shape_latents
from moe_kernels.gpu.heads.kv_rows import rotated, store_quantised
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    LatentShape,
    QKNormWeights,
    RotaryTable,
)
from moe_kernels.interface.kv_form import KVPages

NO_NORM, NORM_BY_HEAD, NORM_BY_ROW, NORM_AFTER_ROTATION = range(4)  # as in kernel.py


def norm_code(shape: AttentionShape) -> int:
    """Returns the code of the point at which the kernel normalises queries and keys."""
    if shape.qk_norm == "row":
        return NORM_BY_ROW
    if shape.qk_norm == "none":
        return NO_NORM
    return NORM_AFTER_ROTATION if shape.is_norm_after_rotation else NORM_BY_HEAD


def shape_qkv(
    qkv: Tensor,
    norm: QKNormWeights | None,
    rotary: RotaryTable,
    positions: Tensor,
    kv_rows: Tensor,
    pages: KVPages,
    shape: AttentionShape,
) -> Tensor:
    """Norm, clip, rotate and scale; keys and values go into the pages -> queries [T, H, D].

    `qkv` [T, (H + Hkv) D + Hkv Dv] is left as it is. `kv_rows` [T * Hkv]: rows of the pages seen as
    [.., D]; a negative one is not written. Everything is rounded once, when it is stored.
    """
    num_tokens, dim, value_dim = len(qkv), shape.head_dim, shape.value_width
    width = (shape.num_heads + shape.num_kv_heads) * dim + shape.num_kv_heads * value_dim
    assert qkv.shape[1] == width and qkv.stride(1) == 1, f"qkv is {qkv.shape}, not [T, {width}]"
    _check_positions(num_tokens, rotary, positions)
    assert rotary.cos.shape[1] <= dim, f"{rotary.cos.shape[1]} values of {dim} are rotated"
    assert kv_rows.numel() == num_tokens * shape.num_kv_heads, f"{kv_rows.numel()} kv rows"
    assert pages.keys.is_contiguous() and pages.values.is_contiguous(), "pages are contiguous"
    keys, values, rows = pages.keys, pages.values, kv_rows
    q_dtype = torch.float32 if pages.form.is_rotated else qkv.dtype
    q_THD = torch.empty(num_tokens, shape.num_heads, dim, dtype=q_dtype, device=qkv.device)
    if not num_tokens:
        return q_THD.to(qkv.dtype)
    if pages.form.bits is not None:  # in fp32 first, then into the pages
        rows = torch.arange(kv_rows.numel(), device=qkv.device)
        keys = torch.empty(len(rows), dim, dtype=torch.float32, device=qkv.device)
        values = torch.empty(len(rows), value_dim, dtype=torch.float32, device=qkv.device)
    _launch_heads(qkv, norm, rotary, (positions, rows), (q_THD, keys, values), shape)
    if pages.form.bits is None:
        return q_THD
    store_quantised(pages, keys, values, kv_rows)
    return rotated(q_THD, pages.form, qkv.dtype)


def _launch_heads(
    qkv: Tensor,
    norm: QKNormWeights | None,
    rotary: RotaryTable,
    places: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    shape: AttentionShape,
) -> None:
    """Launches shape_heads; `places`: positions and rows, `results`: queries, keys and values."""
    dim, value_dim = shape.head_dim, shape.value_width
    code = NO_NORM if norm is None else norm_code(shape)
    config = head_config(shape.num_heads, dim, value_dim)
    kv_blocks = -(-shape.num_kv_heads // config.block_heads)
    grid = (len(qkv), -(-shape.num_heads // config.block_heads) + 2 * kv_blocks)
    shape_heads[grid](
        qkv,
        None if norm is None else norm.q,
        None if norm is None else norm.k,
        rotary.cos,
        rotary.signed_sin,
        rotary.query_scale,
        *places,
        *results,
        qkv.stride(0),
        shape.norm_eps,
        0.0 if shape.clip is None else float(shape.clip),
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=dim,
        VALUE_DIM=value_dim,
        ROTARY_DIM=rotary.cos.shape[1],
        NORM=code,
        HAS_CLIP=shape.clip is not None,
        HAS_QUERY_SCALE=rotary.query_scale is not None,
        BLOCK_H=config.block_heads,
        BLOCK_D=config.block_dim,
        BLOCK_V=config.block_value_dim,
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # as torch: products are rounded before they are added
    )


def shape_latent(
    q_latent_THL: Tensor,
    q_rope_THR: Tensor,
    latent_TC: Tensor,
    norm_weight_L: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    kv_rows: Tensor,
    pages: KVPages,
    shape: LatentShape,
) -> Tensor:
    """Norm the latents, rotate the shared key, write both -> queries [T, H, C] = latent | rotated.

    `latent_TC`: C = L + R. `kv_rows` [T]: rows of keys seen as [.., C]; a negative one is not
    written. The queries' two parts may have any steps between tokens and heads.
    """
    num_tokens, num_heads, rope_dim = q_rope_THR.shape
    latent_dim, width = shape.latent_dim, shape.latent_dim + rope_dim
    assert (num_heads, rope_dim) == (shape.num_heads, shape.rope_dim), f"{q_rope_THR.shape}"
    assert q_latent_THL.shape == (num_tokens, num_heads, latent_dim), f"{q_latent_THL.shape}"
    assert latent_TC.shape == (num_tokens, width), f"latents are {latent_TC.shape}"
    keys, rows = pages.keys, kv_rows
    assert keys.is_contiguous() and keys.shape[-1] == width, f"keys are {keys.shape}"
    _check_positions(num_tokens, rotary, positions)
    assert rotary.cos.shape[1] == rope_dim, f"{rotary.cos.shape[1]} values of {rope_dim} rotate"
    assert kv_rows.numel() == num_tokens, f"{kv_rows.numel()} kv rows of {num_tokens} tokens"
    for name, x in (("q_latent", q_latent_THL), ("q_rope", q_rope_THR), ("latent", latent_TC)):
        assert x.stride(-1) == 1, f"a row of {name} has stride {x.stride(-1)}"
    q_THC = q_rope_THR.new_empty(num_tokens, num_heads, width)
    if not num_tokens:
        return q_THC
    if pages.form.bits is not None:  # in fp32 first, then into the pages
        rows = torch.arange(num_tokens, device=latent_TC.device)
        keys = torch.empty(num_tokens, width, dtype=torch.float32, device=latent_TC.device)
    config = head_config(num_heads, rope_dim, rope_dim)
    shape_latents[(num_tokens, 1 + -(-num_heads // config.block_heads))](
        q_latent_THL, q_rope_THR, latent_TC, norm_weight_L, rotary.cos, rotary.signed_sin,
        positions, rows, q_THC, keys, *q_latent_THL.stride()[:2], *q_rope_THR.stride()[:2],
        latent_TC.stride(0), shape.norm_eps,
        NUM_HEADS=num_heads, LATENT_DIM=latent_dim, ROPE_DIM=rope_dim,
        BLOCK_H=config.block_heads, BLOCK_R=config.block_dim,
        BLOCK_L=1 << (latent_dim - 1).bit_length(),
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    if pages.form.bits is not None:
        store_quantised(pages, keys, None, kv_rows)
    return q_THC


def _check_positions(num_tokens: int, rotary: RotaryTable, positions: Tensor) -> None:
    assert positions.shape == (num_tokens,), f"{positions.shape} positions of {num_tokens} tokens"
    assert rotary.cos.is_contiguous() and rotary.signed_sin.is_contiguous(), "the rotary table"
    assert rotary.cos.dtype == torch.float32, f"the rotary table is {rotary.cos.dtype}, not fp32"
