"""Paged attention against its float64 definition, and its promise: a row depends on itself only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.attention_plan import plan_attention
from moe_kernels.paged_attention import paged_attention, paged_attention_reference

PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-5}  # the math is fp32 either way


@dataclass(frozen=True)
class Sequence:
    """One sequence's pages and query rows: positions [start, start + len(q))."""

    page_table: list[int]
    start: int
    q: Tensor


class Scene:
    """A cache of random pages and sequences that share none of them."""

    def __init__(self, spans: list[tuple[int, int]], heads: tuple[int, int], dtype: torch.dtype):
        generator = torch.Generator().manual_seed(len(spans) * 1000 + heads[0])
        num_heads, num_kv_heads = heads
        needed = [-(-(start + count) // PAGE) for start, count in spans]
        shape = (1 + sum(needed), num_kv_heads, PAGE, 64)
        self.k, self.v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.k[0], self.v[0] = 0, 0
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        self.sequences, self.heads = [], heads
        for (start, count), pages in zip(spans, needed, strict=True):
            table, order = order[:pages], order[pages:]
            q = torch.randn(count, num_heads, 64, generator=generator).to(dtype)
            self.sequences.append(Sequence(table, start, q))

    def run(self, sequences: list[Sequence], window: int | None = None) -> list[Tensor]:
        plan = plan_attention(
            query_lens=np.array([len(s.q) for s in sequences]),
            query_starts=np.array([s.start for s in sequences]),
            page_tables=[s.page_table for s in sequences],
            page_size=PAGE,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            sliding_window=window,
            device=torch.device("cpu"),
        )
        out = paged_attention(torch.cat([s.q for s in sequences]), self.k, self.v, plan, 0.125)
        return list(out.split([len(s.q) for s in sequences]))


SPANS = [
    (0, 1),
    (5, 1),
    (127, 1),
    (128, 1),
    (300, 1),
    (0, 16),
    (0, 33),
    (120, 20),
    (250, 7),
    (0, 260),
]


@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (8, 8), (6, 2), (32, 2)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_the_definition(
    heads: tuple[int, int], window: int | None, dtype: torch.dtype
) -> None:
    scene = Scene(SPANS, heads, dtype)
    for out, s in zip(scene.run(scene.sequences, window), scene.sequences, strict=True):
        expected = paged_attention_reference(
            s.q,
            scene.k,
            scene.v,
            page_table=s.page_table,
            first_position=s.start,
            scale=0.125,
            sliding_window=window,
        )
        error = (out.double() - expected).abs().max().item() / expected.abs().max().item()
        assert error < TOLERANCE[dtype], f"{heads=}, {window=}, {s.start=}, {len(s.q)=}, {error=}"


@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (6, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_and_in_company(
    heads: tuple[int, int], dtype: torch.dtype
) -> None:
    scene = Scene(SPANS, heads, dtype)
    together = scene.run(scene.sequences)
    for index, sequence in enumerate(scene.sequences):
        (alone,) = scene.run([sequence])
        assert torch.equal(alone, together[index]), f"{heads=}, {SPANS[index]=}"


@pytest.mark.parametrize("heads", [(4, 2), (16, 4), (6, 2), (4, 4)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_row_is_bitwise_the_same_however_the_prompt_is_cut(
    heads: tuple[int, int], chunk: int
) -> None:
    scene = Scene([(0, 260)], heads, torch.bfloat16)
    (sequence,) = scene.sequences
    (whole,) = scene.run([sequence])
    for start in range(0, 260, chunk):
        q = sequence.q[start : start + chunk]
        (part,) = scene.run([Sequence(sequence.page_table, start, q)])
        assert torch.equal(part, whole[start : start + chunk]), f"{heads=}, {chunk=}, {start=}"
