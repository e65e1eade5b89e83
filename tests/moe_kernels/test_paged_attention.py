"""Attention over pages: its float64 definition and its promise, for every set of kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import (
    AttentionShape,
    QKNormWeights,
    RotaryTable,
    StepRows,
)
from moe_kernels.interface.kernels import AttentionCall
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.kernel_choice import KernelsName
from moe_kernels.reference.norm import rotary_table
from moe_kernels.reference.paged_attention import paged_attention_reference
from tests.support.kernels.kernel_sets import KERNEL_SETS, make_kernels
from tests.support.kernels.prompt_cuts import pieces_of

PAGE = 16
CPU = torch.device("cpu")
# In bf16 the results are rounded, and the native kernels round queries and weights as well.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Sequence:
    """Rows of qkv at positions [start, start + len)."""

    page_table: list[int]
    start: int
    qkv: Tensor


class Scene:
    """Sequences with pages of their own; the keys before `start` are random and stored already."""

    def __init__(
        self, name: KernelsName, spans: list[tuple[int, int]], shape: AttentionShape,
        dtype: torch.dtype, has_query_scale: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(len(spans) * 1000 + shape.num_heads)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        needed = [-(-(start + count) // PAGE) for start, count in spans]
        size = (1 + sum(needed), shape.num_kv_heads, PAGE)
        keys, values = (random(*size, d).to(dtype) for d in (shape.head_dim, shape.value_width))
        keys[0], values[0] = 0, 0
        self.original = KVPages(keys, values)
        self.shape, self.kernels = shape, make_kernels(name, dtype)
        self.sinks = random(shape.num_heads) if shape.has_sinks else None
        self.norm = self._norm_weights(dtype, generator)
        self.rotary = self._rotary(has_query_scale)
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        width = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        width += shape.num_kv_heads * shape.value_width
        self.sequences = []
        for (start, count), pages in zip(spans, needed, strict=True):
            table, order = order[:pages], order[pages:]
            self.sequences.append(Sequence(table, start, random(count, width).to(dtype)))

    def _norm_weights(self, dtype: torch.dtype, generator: torch.Generator) -> QKNormWeights | None:
        shape = self.shape
        if shape.qk_norm == "none":
            return None
        widths = [shape.head_dim] * 2
        if shape.qk_norm == "row":
            widths = [shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim]
        return QKNormWeights(
            *((0.5 + torch.rand(w, generator=generator)).to(dtype) for w in widths)
        )

    def _rotary(self, has_query_scale: bool) -> RotaryTable:
        """Returns real angles, so that calls must agree on what is rotated where."""
        half = self.shape.num_rotated // 2
        table = rotary_table(torch.arange(600).float()[:, None] * torch.logspace(0, -3, half)[None])
        scale = 1.0 + torch.arange(600).float() / 300 if has_query_scale else None
        return replace(table, query_scale=scale)

    def run(self, sequences: list[Sequence], pages: KVPages | None = None) -> list[Tensor]:
        """Attends on a copy of the pages, or on the given ones."""
        pages = pages or self.copy_pages()
        lens = [len(s.qkv) for s in sequences]
        step = StepRows(
            np.array(lens), np.array([s.start for s in sequences]),
            [s.page_table for s in sequences], PAGE,
        )  # fmt: skip
        positions = torch.cat([torch.arange(s.start, s.start + len(s.qkv)) for s in sequences])
        tables = [torch.tensor(s.page_table) for s in sequences]
        own = [
            t[p // PAGE] * self.shape.num_kv_heads * PAGE + p % PAGE
            for t, p in zip(tables, positions.split(lens), strict=True)
        ]
        heads = torch.arange(self.shape.num_kv_heads) * PAGE
        kv_rows = (torch.cat(own)[:, None] + heads[None]).flatten()
        plan = self.kernels.plan_attention(step, self.shape, CPU)
        call = AttentionCall(self.rotary, positions, kv_rows, pages, plan)
        qkv = torch.cat([s.qkv for s in sequences])
        out = self.kernels.attend(qkv, self.norm, self.sinks, call, self.shape)
        return list(out.split(lens))

    def storing_error(self, dtype: torch.dtype) -> float:
        return TOLERANCE[dtype]

    def copy_pages(self) -> KVPages:
        return KVPages(self.original.keys.clone(), self.original.values.clone())

    def expected(self, sequence: Sequence, pages: KVPages) -> Tensor:
        """Computes attention by definition, from the keys and values that the kernels stored in
        `pages`."""
        shape = self.shape
        q_size, k_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        v_size = shape.num_kv_heads * shape.value_width
        q, k, v = sequence.qkv.double().split([q_size, k_size, v_size], -1)
        weights = (None, None) if self.norm is None else (self.norm.q, self.norm.k)
        positions = torch.arange(sequence.start, sequence.start + len(q))
        q = self._shape_heads(q, weights[0], positions)
        k = self._shape_heads(k, weights[1], positions)
        if self.rotary.query_scale is not None:
            q = q * self.rotary.query_scale[positions][:, None, None]
        if shape.clip is not None:
            v = v.clamp(-shape.clip, shape.clip)
        table = torch.tensor(sequence.page_table)[positions // PAGE]
        for cache, new in ((pages.keys, k), (pages.values, v.view(len(v), -1, shape.value_width))):
            stored = cache[table, :, positions % PAGE].double()
            error = (stored - new).abs().max().item() / new.abs().max().item()
            assert error < self.storing_error(cache.dtype), f"stored wrongly: {error=}"
        return paged_attention_reference(
            q, pages.keys, pages.values, page_table=sequence.page_table,
            first_position=sequence.start, scale=shape.scale, chunk=shape.chunk,
            sliding_window=shape.sliding_window, sinks_H=self.sinks,
        ).flatten(1)  # fmt: skip

    def _shape_heads(self, x: Tensor, weight: Tensor | None, positions: Tensor) -> Tensor:
        shape, width = self.shape, self.shape.num_rotated
        if weight is not None and shape.qk_norm == "row":
            x = _norm(x, weight, shape.norm_eps)
        if shape.clip is not None:
            x = x.clamp(-shape.clip, shape.clip)
        x = x.view(len(x), -1, shape.head_dim)
        is_by_head = weight is not None and shape.qk_norm == "head"
        if is_by_head and not shape.is_norm_after_rotation:
            x = _norm(x, weight, shape.norm_eps)
        first, rest = x[..., :width], x[..., width:]
        swapped = torch.cat((first[..., width // 2 :], first[..., : width // 2]), -1)
        cos, sin = self.rotary.cos[positions], self.rotary.signed_sin[positions]
        x = torch.cat((first * cos[:, None] + swapped * sin[:, None], rest), -1)
        return (
            _norm(x, weight, shape.norm_eps) if is_by_head and shape.is_norm_after_rotation else x
        )


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    assert weight is not None
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def shape_of(heads: tuple[int, int], window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, sliding_window=window
    )


SPANS = [
    (0, 1), (5, 1), (127, 1), (128, 1), (300, 1), (0, 16), (0, 33), (120, 20), (250, 7), (0, 260),
]  # fmt: skip
SHAPES = {
    "norm by head": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm="head"),
    "norm by row, clip": AttentionShape(
        num_heads=4, num_kv_heads=4, head_dim=32, qk_norm="row", clip=1.5
    ),
    "partial rotation, norm after it": AttentionShape(
        num_heads=4, num_kv_heads=2, head_dim=96, rotary_dim=24, qk_norm="head",
        is_norm_after_rotation=True,
    ),
    "narrow values": AttentionShape(
        num_heads=8, num_kv_heads=2, head_dim=48, value_dim=20, rotary_dim=32
    ),
    "odd values": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=10, value_dim=5),
    "wide values": AttentionShape(num_heads=2, num_kv_heads=2, head_dim=40, value_dim=128),
    "sinks, window": AttentionShape(
        num_heads=16, num_kv_heads=2, head_dim=64, has_sinks=True, sliding_window=70
    ),
    "sinks, scale": AttentionShape(
        num_heads=6, num_kv_heads=2, head_dim=128, has_sinks=True, softmax_scale=0.3
    ),
    "chunk": AttentionShape(num_heads=5, num_kv_heads=1, head_dim=128, chunk=50),
    "many heads": AttentionShape(num_heads=70, num_kv_heads=1, head_dim=80, value_dim=64),
}  # fmt: skip


def check_scene(scene: Scene, dtype: torch.dtype, what: str) -> None:
    pages = scene.copy_pages()
    for out, sequence in zip(scene.run(scene.sequences, pages), scene.sequences, strict=True):
        expected = scene.expected(sequence, pages)
        error = (out.double() - expected).abs().max().item() / expected.abs().max().item()
        assert error < TOLERANCE[dtype], f"{what}, {sequence.start=}, {error=}"


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (8, 8), (6, 2), (32, 2)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_the_definition(
    name: KernelsName, heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    check_scene(Scene(name, SPANS, shape_of(heads, window), dtype), dtype, f"{name}, {heads=}")


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_shape_matches_the_definition(
    name: KernelsName, kind: str, dtype: torch.dtype
) -> None:
    scene = Scene(name, SPANS, SHAPES[kind], dtype, has_query_scale=True)
    check_scene(scene, dtype, f"{name}, {kind}")


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(
    "shape", [*(shape_of(h) for h in ((4, 2), (16, 4), (6, 2), (4, 4))), *SHAPES.values()], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_in_company(
    name: KernelsName, shape: AttentionShape, dtype: torch.dtype
) -> None:
    scene = Scene(name, SPANS, shape, dtype)
    together = scene.run(scene.sequences)
    for index, sequence in enumerate(scene.sequences):
        (alone,) = scene.run([sequence])
        assert torch.equal(alone, together[index]), f"{name}, {SPANS[index]=}"


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize(
    "shape",
    [
        shape_of((4, 2)),
        shape_of((6, 2)),
        SHAPES["sinks, window"],
        SHAPES["chunk"],
        SHAPES["odd values"],
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_however_the_prompt_is_cut(
    name: KernelsName, shape: AttentionShape, chunk: int, dtype: torch.dtype
) -> None:
    scene = Scene(name, [(0, 260)], shape, dtype)
    (sequence,) = scene.sequences
    (whole,) = scene.run([sequence])
    pages = scene.copy_pages()
    for start, end in pieces_of(260, chunk):
        piece = Sequence(sequence.page_table, start, sequence.qkv[start:end])
        (part,) = scene.run([piece], pages)
        assert torch.equal(part, whole[start:end]), f"{name}, {start=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_behind_a_sequence_in_its_page_is_not_seen(
    name: KernelsName, dtype: torch.dtype
) -> None:
    scene = Scene(name, [(3, 2)], shape_of((4, 2)), dtype)
    (clean,) = scene.run(scene.sequences)
    scene.original.keys[:, :, 5:], scene.original.values[:, :, 5:] = 7.0, -9.0
    (dirty,) = scene.run(scene.sequences)
    assert torch.equal(clean, dirty)
