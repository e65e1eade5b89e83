"""Attention over latents: its float64 definition and its promise, for every set of kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import LatentShape, StepRows
from moe_kernels.interface.kernels import AttentionCall
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.norm import rotary_table
from moe_kernels.reference.paged_attention import paged_attention_reference
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels
from tests.support.kernels.prompt_cuts import pieces_of

PAGE = 16
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
LENGTH = 150


def shape_of(num_heads: int, latent: int, rope: int) -> LatentShape:
    return LatentShape(
        num_heads=num_heads, nope_dim=32, rope_dim=rope, value_dim=32, latent_dim=latent,
        query_rank=None, norm_eps=1e-6, softmax_scale=(32 + rope) ** -0.5,
    )  # fmt: skip


class Scene:
    """One sequence of LENGTH tokens; the two parts of its queries are strided views."""

    def __init__(self, name: KernelsName, shape: LatentShape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(shape.num_heads)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.kernels, self.shape = make_kernels(name, dtype), shape
        num_pages = -(-LENGTH // PAGE)
        self.table = (1 + torch.randperm(num_pages, generator=generator)).tolist()
        self.q_latent = random(LENGTH, shape.num_heads, shape.latent_dim)
        wide = random(LENGTH, shape.num_heads, shape.nope_dim + shape.rope_dim)
        self.q_rope = wide[..., shape.nope_dim :]
        both = random(LENGTH, 8 + shape.latent_dim + shape.rope_dim)
        self.latent = both[:, 8:]
        self.norm = (0.5 + torch.rand(shape.latent_dim, generator=generator)).to(dtype)
        angles = torch.arange(LENGTH)[:, None] * torch.logspace(0, -3, shape.rope_dim // 2)[None]
        self.rotary = rotary_table(angles.float())
        self.dtype = dtype

    def empty_pages(self) -> KVPages:
        width = self.shape.latent_dim + self.shape.rope_dim
        keys = torch.zeros(1 + len(self.table), 1, PAGE, width, dtype=self.dtype)
        return KVPages(keys, keys[..., : self.shape.latent_dim])

    def run(self, first: int, last: int, pages: KVPages) -> Tensor:
        """Computes tokens [first, last); the earlier ones are in the pages."""
        step = StepRows(np.array([last - first]), np.array([first]), [self.table], PAGE)
        positions = torch.arange(first, last)
        rows = torch.tensor(self.table)[positions // PAGE] * PAGE + positions % PAGE
        plan = self.kernels.plan_attention(step, self.shape.absorbed(), CPU)
        return self.kernels.attend_latent(
            self.q_latent[first:last], self.q_rope[first:last], self.latent[first:last],
            self.norm, AttentionCall(self.rotary, positions, rows, pages, plan), self.shape,
        )  # fmt: skip


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("sizes", [(4, 64, 16), (70, 512, 64), (20, 40, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_the_definition(
    name: KernelsName, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    scene = Scene(name, shape_of(*sizes), dtype)
    shape, pages = scene.shape, scene.empty_pages()
    out = scene.run(0, LENGTH, pages)
    assert out.shape == scene.q_latent.shape and out.dtype == dtype and out.is_contiguous()

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = shape.rope_dim // 2
        return x.double() * cos + torch.cat((x[..., half:], x[..., :half]), -1).double() * sin

    latent, key = scene.latent.double().split([shape.latent_dim, shape.rope_dim], -1)
    latent = latent / (latent.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scene.norm.double()
    cos, sin = scene.rotary.cos, scene.rotary.signed_sin
    rows = torch.cat((latent, rotated(key, cos, sin)), -1)
    stored = pages.keys[scene.table].flatten(0, 2)[:LENGTH].double()
    error = ((stored - rows).abs().max() / rows.abs().max()).item()
    assert error < TOLERANCE[dtype], f"{name}, {sizes=}: stored wrongly, {error=}"
    q = torch.cat((scene.q_latent.double(), rotated(scene.q_rope, cos[:, None], sin[:, None])), -1)
    expected = paged_attention_reference(
        q, pages.keys, pages.values, page_table=scene.table, first_position=0,
        scale=shape.softmax_scale,
    )  # fmt: skip
    error = ((out.double() - expected).abs().max() / expected.abs().max()).item()
    assert error < TOLERANCE[dtype], f"{name}, {sizes=}, {error=}"


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("sizes", [(4, 64, 16), (70, 512, 64), (20, 40, 8)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_however_the_prompt_is_cut(
    name: KernelsName, sizes: tuple[int, int, int], chunk: int, dtype: torch.dtype
) -> None:
    scene = Scene(name, shape_of(*sizes), dtype)
    whole, pages = scene.run(0, LENGTH, scene.empty_pages()), scene.empty_pages()
    for first, last in pieces_of(LENGTH, chunk):
        part = scene.run(first, last, pages)
        assert torch.equal(part, whole[first:last]), f"{name}, {sizes=}, {first=}"
