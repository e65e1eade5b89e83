"""Norm, rotation and the write into the pages, against the steps of the plain kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.heads.api import shape_latent, shape_qkv
from moe_kernels.gpu.heads.heuristics import HeadConfig, head_config
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    LatentShape,
    QKNormWeights,
    RotaryTable,
)
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.reference import torch_kernels
from moe_kernels.reference.norm import rms_norm, rotary_table

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative to 1: a norm may round to the neighbouring value, and the rotation rounds once more.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PLAIN = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16)
SHAPES = {
    "plain": PLAIN,
    "norm by head": replace(PLAIN, qk_norm="head"),
    "norm by row": replace(PLAIN, num_heads=6, num_kv_heads=3, head_dim=24, qk_norm="row"),
    "norm after rotation": replace(PLAIN, qk_norm="head", is_norm_after_rotation=True),
    "clip": replace(PLAIN, qk_norm="row", clip=0.8),
    "partial, narrow values": replace(PLAIN, head_dim=40, rotary_dim=12, value_dim=8),
    "wide": replace(PLAIN, num_heads=9, num_kv_heads=1, head_dim=128, qk_norm="head"),
}
TOKENS, PAGES, PAGE = 5, 4, 16


def random(device: torch.device, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


def make_rotary(device: torch.device, width: int, has_scale: bool = False) -> RotaryTable:
    table = rotary_table(random(device, 60, width // 2, seed=7))
    scale = random(device, 60, seed=8) if has_scale else None
    return RotaryTable(table.cos.contiguous(), table.signed_sin.contiguous(), scale)


def make_pages(device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> KVPages:
    size = (PAGES, shape.num_kv_heads, PAGE)
    keys = torch.zeros(*size, shape.head_dim, dtype=dtype, device=device)
    return KVPages(keys, torch.zeros(*size, shape.value_width, dtype=dtype, device=device))


def reference(
    qkv: Tensor,
    norm: QKNormWeights | None,
    rotary: RotaryTable,
    positions: Tensor,
    shape: AttentionShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Does the first lines of TorchKernels.attend."""
    q, k, v = torch_kernels._split(qkv, norm, shape)
    q, k = (torch_kernels._rotate(x, rotary, positions) for x in (q, k))
    if norm is not None and shape.is_norm_after_rotation:
        q, k = torch_kernels._norm_heads(q, k, norm, shape)
    if rotary.query_scale is not None:
        q = q * rotary.query_scale[positions][:, None, None]
    return q.to(qkv.dtype), k.to(qkv.dtype), v


def make_norm(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape
) -> QKNormWeights | None:
    if shape.qk_norm == "none":
        return None
    dim = shape.head_dim
    is_row = shape.qk_norm == "row"
    widths = (shape.num_heads * dim, shape.num_kv_heads * dim) if is_row else (dim, dim)
    return QKNormWeights(*(random(device, w, seed=w).to(dtype) for w in widths))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_heads_are_shaped_and_stored(name: str, dtype: torch.dtype, device: torch.device) -> None:
    shape = SHAPES[name]
    kv_heads = shape.num_kv_heads
    width = (shape.num_heads + kv_heads) * shape.head_dim + kv_heads * shape.value_width
    qkv = random(device, TOKENS, width).to(dtype)
    norm = make_norm(device, dtype, shape)
    rotary = make_rotary(device, shape.num_rotated, has_scale=name in ("plain", "clip"))
    positions = torch.tensor([0, 7, 59, 3, 8], device=device)
    order = torch.Generator().manual_seed(3)
    kv_rows = torch.randperm(PAGES * kv_heads * PAGE, generator=order)[: TOKENS * kv_heads]
    kv_rows = kv_rows.to(device)
    pages = make_pages(device, dtype, shape)
    q = shape_qkv(qkv, norm, rotary, positions, kv_rows, pages, shape)
    expected = reference(qkv, norm, rotary, positions, shape)
    keys, values = (t.view(-1, t.shape[-1])[kv_rows] for t in (pages.keys, pages.values))
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(q, expected[0], **close)
    torch.testing.assert_close(keys, expected[1].flatten(0, 1), **close)
    assert torch.equal(values, expected[2].flatten(0, 1)), "values are copied"
    rest = torch.ones(PAGES * kv_heads * PAGE, dtype=torch.bool, device=device)
    rest[kv_rows] = False
    assert not pages.keys.view(-1, shape.head_dim)[rest].any(), "another row was written"
    for t in range(TOKENS):
        few = make_pages(device, dtype, shape)
        rows = kv_rows[t * kv_heads : (t + 1) * kv_heads]
        alone = shape_qkv(qkv[t : t + 1], norm, rotary, positions[t : t + 1], rows, few, shape)
        assert torch.equal(alone[0], q[t]), f"token {t}: its queries depend on the others"
        here = few.keys.view(-1, shape.head_dim)[rows]
        assert torch.equal(here, keys.view(TOKENS, kv_heads, -1)[t]), f"token {t}: its keys"


def test_a_negative_row_is_not_written(device: torch.device) -> None:
    qkv = random(device, 2, (4 + 2 + 2) * 16)
    pages = make_pages(device, torch.float32, PLAIN)
    kv_rows = torch.tensor([3, 5, -1, -1], device=device)
    positions = torch.tensor([1, 0], device=device)
    shape_qkv(qkv, None, make_rotary(device, 16), positions, kv_rows, pages, PLAIN)
    for cache in (pages.keys, pages.values):
        written = cache.view(-1, 16).any(dim=-1).nonzero()[:, 0].tolist()
        assert written == [3, 5], f"rows {written} were written"


def test_a_clipped_nan_stays_one(device: torch.device) -> None:
    shape = SHAPES["clip"]
    qkv = random(device, 1, (4 + 2 + 2) * 16)
    qkv[0, -1] = float("nan")
    pages = make_pages(device, torch.float32, shape)
    norm = make_norm(device, torch.float32, shape)
    rows, zero = torch.tensor([0, 1], device=device), torch.tensor([0], device=device)
    shape_qkv(qkv, norm, make_rotary(device, 16), zero, rows, pages, shape)
    assert pages.values.view(-1, 16)[1, -1].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents(dtype: torch.dtype, device: torch.device) -> None:
    shape = LatentShape(
        num_heads=3, nope_dim=8, rope_dim=8, value_dim=8, latent_dim=24, query_rank=None,
        norm_eps=1e-6, softmax_scale=1.0,
    )  # fmt: skip
    latent = random(device, 4, 40).to(dtype)[:, :32]
    q_latent = random(device, 3, 4, 24, seed=1).to(dtype).transpose(0, 1)
    q_rope = random(device, 4, 3, 16, seed=2).to(dtype)[..., 8:]
    weight = random(device, 24, seed=4).to(dtype)
    rotary, positions = make_rotary(device, 8), torch.tensor([9, 0, 1, 2], device=device)
    keys = torch.zeros(2, 1, 16, 32, dtype=dtype, device=device)
    kv_rows = torch.tensor([31, 2, -1, 7], device=device)
    pages = KVPages(keys, keys[..., : shape.latent_dim])
    q = shape_latent(q_latent, q_rope, latent, weight, rotary, positions, kv_rows, pages, shape)
    rotated = torch_kernels._rotate(q_rope, rotary, positions).to(dtype)
    assert torch.equal(q, torch.cat((q_latent, rotated), -1)), "queries are bit for bit"
    key = torch_kernels._rotate(latent[:, None, 24:], rotary, positions)[:, 0].to(dtype)
    normed = rms_norm(latent[:, :24].contiguous(), weight, 1e-6)
    rows, kept = keys.view(-1, 32), [0, 1, 3]
    assert torch.equal(rows[kv_rows[kept], 24:], key[kept]), "the shared key is bit for bit"
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(rows[kv_rows[kept], :24], normed[kept], **close)
    assert rows.any(dim=-1).nonzero()[:, 0].tolist() == [2, 7, 31]


def test_config_follows_the_shape() -> None:
    expected = HeadConfig(block_heads=8, block_dim=128, block_value_dim=128)
    assert head_config(32, 128, 128) == expected
    assert head_config(2, 40, 8) == HeadConfig(block_heads=2, block_dim=64, block_value_dim=8)
