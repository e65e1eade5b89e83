"""Attention over pages: its float64 definition and its promise, for every set of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_sets import KERNEL_SETS, make_kernels
from torch import Tensor

from moe_kernels.attention_shape import AttentionShape, RotaryTable, StepTokens
from moe_kernels.choice import KernelsName
from moe_kernels.kernels import KVPages
from moe_kernels.norm import rotary_table
from moe_kernels.paged_attention import paged_attention_reference

PAGE = 16
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3}  # the math is fp32, the result rounded


def rotary() -> RotaryTable:
    """Real angles: what is rotated where must agree between calls."""
    return rotary_table(torch.arange(600).float()[:, None] * torch.logspace(0, -3, 32)[None])


@dataclass(frozen=True)
class Sequence:
    """Rows of qkv at positions [start, start + len)."""

    page_table: list[int]
    start: int
    qkv: Tensor


class Scene:
    """Sequences with pages of their own; the keys before `start` are random and already there."""

    def __init__(
        self, name: KernelsName, spans: list[tuple[int, int]], shape: AttentionShape,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(len(spans) * 1000 + shape.num_heads)
        needed = [-(-(start + count) // PAGE) for start, count in spans]
        size = (1 + sum(needed), shape.num_kv_heads, PAGE, shape.head_dim)
        keys, values = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
        keys[0], values[0] = 0, 0
        self.original = KVPages(keys, values)
        self.shape, self.kernels = shape, make_kernels(name, dtype)
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.sequences = []
        for (start, count), pages in zip(spans, needed, strict=True):
            table, order = order[:pages], order[pages:]
            qkv = torch.randn(count, width, generator=generator).to(dtype)
            self.sequences.append(Sequence(table, start, qkv))

    def run(self, sequences: list[Sequence], pages: KVPages | None = None) -> list[Tensor]:
        """Attend on a copy of the pages (or on those given)."""
        pages = pages or KVPages(self.original.keys.clone(), self.original.values.clone())
        lens = [len(s.qkv) for s in sequences]
        step = StepTokens(
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
        out = self.kernels.attend(
            torch.cat([s.qkv for s in sequences]), None, rotary(), positions,
            (torch.cat(own)[:, None] + heads[None]).flatten(), pages,
            self.kernels.plan_attention(step, self.shape, CPU), self.shape,
        )  # fmt: skip
        return list(out.split(lens))

    def expected(self, sequence: Sequence) -> Tensor:
        """By the definition, from the rotated keys that the kernels stored."""
        pages = KVPages(self.original.keys.clone(), self.original.values.clone())
        self.run([sequence], pages)
        num_heads, dim = self.shape.num_heads, self.shape.head_dim
        q = sequence.qkv[:, : num_heads * dim].view(-1, num_heads, dim).double()
        positions = slice(sequence.start, sequence.start + len(q))
        table = rotary()
        swapped = torch.cat((q[..., dim // 2 :], q[..., : dim // 2]), -1)
        q = q * table.cos[positions][:, None] + swapped * table.signed_sin[positions][:, None]
        return paged_attention_reference(
            q, pages.keys, pages.values, page_table=sequence.page_table,
            first_position=sequence.start, scale=self.shape.scale,
            sliding_window=self.shape.sliding_window,
        ).flatten(1)  # fmt: skip


def shape_of(heads: tuple[int, int], window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, sliding_window=window
    )


SPANS = [
    (0, 1), (5, 1), (127, 1), (128, 1), (300, 1), (0, 16), (0, 33), (120, 20), (250, 7), (0, 260),
]  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (8, 8), (6, 2), (32, 2)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_the_definition(
    name: KernelsName, heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    scene = Scene(name, SPANS, shape_of(heads, window), dtype)
    for out, sequence in zip(scene.run(scene.sequences), scene.sequences, strict=True):
        expected = scene.expected(sequence)
        error = (out.double() - expected).abs().max().item() / expected.abs().max().item()
        assert error < TOLERANCE[dtype], f"{name}, {heads=}, {window=}, {sequence.start=}, {error=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (6, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_in_company(
    name: KernelsName, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    scene = Scene(name, SPANS, shape_of(heads), dtype)
    together = scene.run(scene.sequences)
    for index, sequence in enumerate(scene.sequences):
        (alone,) = scene.run([sequence])
        assert torch.equal(alone, together[index]), f"{name}, {heads=}, {SPANS[index]=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (6, 2), (4, 4)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_row_is_bitwise_the_same_however_the_prompt_is_cut(
    name: KernelsName, heads: tuple[int, int], chunk: int
) -> None:
    scene = Scene(name, [(0, 260)], shape_of(heads), torch.bfloat16)
    (sequence,) = scene.sequences
    (whole,) = scene.run([sequence])
    pages = KVPages(scene.original.keys.clone(), scene.original.values.clone())
    for start in range(0, 260, chunk):
        piece = Sequence(sequence.page_table, start, sequence.qkv[start : start + chunk])
        (part,) = scene.run([piece], pages)
        assert torch.equal(part, whole[start : start + chunk]), f"{name}, {heads=}, {start=}"


@pytest.mark.parametrize("name", KERNEL_SETS)
def test_what_lies_behind_a_sequence_in_its_page_is_not_seen(name: KernelsName) -> None:
    scene = Scene(name, [(3, 2)], shape_of((4, 2)), torch.float32)
    (clean,) = scene.run(scene.sequences)
    scene.original.keys[:, :, 5:], scene.original.values[:, :, 5:] = 7.0, -9.0
    (dirty,) = scene.run(scene.sequences)
    assert torch.equal(clean, dirty)
