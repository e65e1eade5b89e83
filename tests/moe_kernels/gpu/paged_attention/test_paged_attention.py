"""Triton's attention over pages: the float64 definition, and equal bits in every cut of the
rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.paged_attention import launch_plan as plan_module
from moe_kernels.gpu.paged_attention.api import attention, config_of, is_latent
from moe_kernels.gpu.paged_attention.launch_plan import PagedPlan, plan_paged_attention, plan_sizes
from moe_kernels.interface.attention_shape import AttentionShape, StepRows
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.reference.paged_attention import paged_attention_reference

PAGE = 16
# Queries, weights and results are rounded to the pages' dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Span = tuple[int, int]  # first position and number of query tokens


def grouped(heads: int, kv_heads: int, head_dim: int, **more: object) -> AttentionShape:
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **more)  # type: ignore[arg-type]


LATENT = grouped(5, 1, 48, value_dim=32, softmax_scale=0.2)  # 32 and the 16 of the shared key
WIDE = grouped(6, 1, 48, value_dim=32, softmax_scale=0.2)  # the same, and tiles join in a scratch
SHAPES = {
    "one head each": grouped(2, 2, 16),
    "group of 4": grouped(8, 2, 32),
    "group of 8": grouped(8, 1, 16, softmax_scale=0.5),
    "group of 5, window": grouped(5, 1, 16, sliding_window=40),
    "wide window": grouped(4, 1, 16, sliding_window=300, has_sinks=True),
    "chunk": grouped(4, 1, 16, chunk=100),
    "sinks": grouped(4, 2, 16, has_sinks=True),
    "narrow values": grouped(4, 1, 48, value_dim=16),
    "widths that are no power of two": grouped(4, 1, 40, value_dim=24),
    "latent": LATENT,
    "wide latent": WIDE,
}
MIXED: list[Span] = [(0, 1), (599, 1), (0, 20), (254, 3), (300, 12), (15, 1), (16, 2)]


class Scene:
    """Sequences with scattered pages of their own. Memory without keys is NaN, except page 0:
    zeros."""

    def __init__(
        self, shape: AttentionShape, lengths: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths) * 100 + shape.num_heads)
        needed = [-(-length // PAGE) for length in lengths]
        order = (1 + torch.randperm(sum(needed), generator=generator)).tolist()
        size = (1 + sum(needed), shape.num_kv_heads, PAGE)
        has_one_tensor = shape in (LATENT, WIDE)

        def pages(width: int) -> Tensor:
            made = torch.randn(*size, width, generator=generator)
            made[0] = 0
            for table, length in zip(self.tables, lengths, strict=True):
                if length % PAGE:
                    made[table[-1], :, length % PAGE :] = float("nan")
            return made.to(dtype).to(device)

        self.tables = []
        for num in needed:
            self.tables.append(order[:num])
            order = order[num:]
        self.shape, self.dtype, self.device = shape, dtype, device
        self.keys = pages(shape.head_dim)
        values = self.keys[..., : shape.value_width]
        self.values = values if has_one_tensor else pages(shape.value_width)
        self.sinks = None
        if shape.has_sinks:
            self.sinks = torch.randn(shape.num_heads, generator=generator).to(device)
        self.q = [
            torch.randn(length, shape.num_heads, shape.head_dim, generator=generator)
            .to(dtype)
            .to(device)
            for length in lengths
        ]

    def step(self, rows: list[tuple[int, int, int]]) -> StepRows:
        """Returns the rows of a step: (sequence, first position, tokens)."""
        return StepRows(
            np.array([count for _, _, count in rows]),
            np.array([start for _, start, _ in rows]),
            [self.tables[sequence] for sequence, _, _ in rows],
            PAGE,
        )

    def plan(
        self, rows: list[tuple[int, int, int]], most_items: int | None = None, split: int = 256
    ) -> PagedPlan:
        """Plans in the tiles of half precision for every dtype, because these tiles ship."""
        config = replace(config_of(self.shape, torch.bfloat16), split_tokens=split)
        if self.shape == WIDE:
            config = replace(config, join_columns=16)
        if most_items is not None:
            config = replace(config, max_item_tokens=most_items)
        return plan_paged_attention(self.step(rows), self.shape, config, self.device)

    def run(self, rows: list[tuple[int, int, int]], plan: PagedPlan | None = None) -> list[Tensor]:
        q = torch.cat([self.q[sequence][start : start + n] for sequence, start, n in rows])
        plan = plan or self.plan(rows)
        out = attention(q, KVPages(self.keys, self.values), plan, self.shape, self.sinks)
        return list(out.split([n for _, _, n in rows]))

    def expected(self, sequence: int, start: int, count: int) -> Tensor:
        return paged_attention_reference(
            self.q[sequence][start : start + count].cpu(),
            self.keys.cpu(),
            self.values.cpu(),
            page_table=self.tables[sequence],
            first_position=start,
            scale=self.shape.scale,
            sliding_window=self.shape.sliding_window,
            chunk=self.shape.chunk,
            sinks_H=None if self.sinks is None else self.sinks.cpu(),
        )


def scene_of(
    shape: AttentionShape, spans: list[Span], dtype: torch.dtype, device: torch.device
) -> tuple[Scene, list[tuple[int, int, int]]]:
    scene = Scene(shape, [start + count for start, count in spans], dtype, device)
    return scene, [(i, start, count) for i, (start, count) in enumerate(spans)]


def check(scene: Scene, rows: list[tuple[int, int, int]], outs: list[Tensor]) -> None:
    for row, out in zip(rows, outs, strict=True):
        expected = scene.expected(*row)
        assert out.shape == expected.shape, f"{row=}: {tuple(out.shape)}"
        error = ((out.cpu().double() - expected).abs().max() / expected.abs().max()).item()
        assert error < TOLERANCE[scene.dtype], f"{scene.shape}, {row=}, {error=}"


@pytest.mark.parametrize("name", SHAPES)
def test_matches_the_definition(name: str, device: torch.device) -> None:
    scene, rows = scene_of(SHAPES[name], MIXED, torch.float32, device)
    assert is_latent(scene.keys, scene.values, config_of(scene.shape, scene.dtype)) == (
        "latent" in name
    )
    plan = scene.plan(rows, most_items=3)
    assert plan.sizes.num_tiles and plan.sizes.num_items, f"{plan.sizes}: both ways are meant"
    check(scene, rows, scene.run(rows, plan))


@pytest.mark.parametrize("name", ["group of 4", "wide window", "latent"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    scene, rows = scene_of(SHAPES[name], [(0, 1), (310, 1), (300, 30)], dtype, device)
    check(scene, rows, scene.run(rows, scene.plan(rows, most_items=3)))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 64, 65, 255, 256, 257, 512, 513, 600])
def test_every_length(length: int, device: torch.device) -> None:
    scene, rows = scene_of(grouped(4, 1, 16), [(length - 1, 1)], torch.float32, device)
    check(scene, rows, scene.run(rows))


@pytest.mark.usefixtures("rows_are_alike")
@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["group of 5, window", "wide window", "chunk", "latent", "wide latent"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_decoded_and_in_a_prompt(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """The prompt comes as tiles, and in pieces of 1, 3 and 70 tokens as items."""
    length = 280
    scene = Scene(SHAPES[name], [length], dtype, device)
    (whole,) = scene.run([(0, 0, length)], scene.plan([(0, 0, length)], most_items=0))
    pieces = [(0, start, 1) for start in (0, 1, 15, 16, 63, 64, 99, 100, 255, 256, 257, 279)]
    pieces += [(0, 30, 3), (0, 254, 3), (0, 200, 70)]
    outs = scene.run(pieces, scene.plan(pieces, most_items=length))
    for (_, start, count), out in zip(pieces, outs, strict=True):
        assert torch.equal(out, whole[start : start + count]), f"{name}, {start=}, {count=}"


@pytest.mark.sampled
@pytest.mark.usefixtures("rows_are_alike")
@pytest.mark.parametrize("name", ["group of 4", "wide window", "latent", "wide latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    spans: list[Span] = [(20, 1), (300, 1), (0, 20), (256, 2)]
    scene, rows = scene_of(SHAPES[name], spans, dtype, device)
    together = scene.run(rows, scene.plan(rows, most_items=2))
    for row, out in zip(rows, together, strict=True):
        (alone,) = scene.run([row], scene.plan([row], most_items=2))
        assert torch.equal(alone, out), f"{name}, {row=}"


def test_more_heads_than_rows_of_a_tile(device: torch.device) -> None:
    shape = grouped(70, 1, 16)
    assert config_of(shape, torch.bfloat16).head_blocks == 2
    scene, rows = scene_of(shape, [(40, 1), (3, 4)], torch.bfloat16, device)
    check(scene, rows, scene.run(rows))


@pytest.mark.usefixtures("rows_are_alike")
def test_a_latent_of_real_width(device: torch.device) -> None:
    shape = grouped(16, 1, 576, value_dim=512, softmax_scale=0.07)
    config = config_of(shape, torch.bfloat16)
    assert config.join_columns, "rows as wide as this are joined in a scratch"
    scene, rows = scene_of(shape, [(40, 1), (60, 6)], torch.bfloat16, device)
    scene.values = scene.keys[..., :512]
    as_items, as_tiles = (
        scene.run(rows, plan_paged_attention(
            scene.step(rows), shape, replace(config, max_item_tokens=most), device
        ))
        for most in (6, 1)
    )  # fmt: skip
    check(scene, rows, as_items)
    assert all(map(torch.equal, as_items, as_tiles)), "tiles have other bits than items"
    assert torch.equal(scene.run([(1, 65, 1)])[0], as_items[1][5:])


@pytest.mark.usefixtures("rows_are_alike")
def test_a_padded_plan_gives_the_same_bits_and_serves_other_steps(device: torch.device) -> None:
    scene, rows = scene_of(grouped(4, 2, 16), [(299, 1), (40, 1), (3, 30)], torch.float32, device)
    config = replace(config_of(scene.shape, torch.bfloat16), split_tokens=256, max_item_tokens=4)
    sizes = plan_sizes(scene.step(rows), scene.shape, config)
    room = replace(
        sizes, num_sequences=5, num_items=sizes.num_items + 3,
        num_item_tiles=sizes.num_item_tiles + 2, num_tiles=sizes.num_tiles + 1,
        table_width=sizes.table_width + 16, item_tile_tokens=3,
    )  # fmt: skip
    assert sizes.fits(room) and not room.fits(sizes)
    plan = plan_paged_attention(scene.step(rows), scene.shape, config, scene.device, room)
    for padded, own in zip(
        scene.run(rows, plan), scene.run(rows, scene.plan(rows, 4)), strict=True
    ):
        assert torch.equal(padded, own), "padding changes a row"
    other = [(1, 17, 1)]
    where = plan.buffer.data_ptr()
    plan.update(scene.step(other))
    assert plan.buffer.data_ptr() == where, "a captured graph reads the old address"
    assert torch.equal(scene.run(other, plan)[0], scene.run(other)[0])
    with pytest.raises(AssertionError, match="does not fit"):
        plan.update(scene.step([(0, start, 1) for start in range(9)]))


@pytest.mark.usefixtures("rows_are_alike")
def test_slabs_change_no_bit(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    scene, rows = scene_of(LATENT, [(299, 1), (270, 9), (3, 1)], torch.bfloat16, device)
    before = scene.run(rows)
    monkeypatch.setattr(plan_module, "MAX_PARTIAL_BYTES", 1)
    plan = scene.plan(rows, most_items=20)
    assert len(plan.slabs) > 2, f"{plan.slabs}"
    for one, out in zip(before, scene.run(rows, plan), strict=True):
        assert torch.equal(one, out), "slabs change a row"


def test_queries_may_be_wider_and_strided(device: torch.device) -> None:
    """The rotation leaves queries in fp32, as a slice of a wider row."""
    scene, rows = scene_of(grouped(4, 2, 16), [(40, 1), (3, 4)], torch.bfloat16, device)
    q = torch.cat([scene.q[0][40:41], scene.q[1][3:7]])
    wide = torch.full((5, 6, 32), float("nan"), device=device)
    wide[:, 1:5, 8:24] = q.float()
    plan, pages = scene.plan(rows), KVPages(scene.keys, scene.values)
    expected = attention(q, pages, plan, scene.shape)
    out = torch.empty(5, 4, 32, dtype=torch.float32, device=device)[..., :16]
    given = wide[:, 1:5, 8:24]
    got = attention(given, pages, plan, scene.shape, out_THV=out)
    assert got is out and torch.equal(got.bfloat16(), expected)


def test_refusals(device: torch.device) -> None:
    scene, rows = scene_of(grouped(4, 2, 16), [(3, 1)], torch.float32, device)
    plan, q, pages = scene.plan(rows), scene.q[0][3:], KVPages(scene.keys, scene.values)
    with pytest.raises(AssertionError, match="the plan is of"):
        attention(q, pages, plan, grouped(4, 2, 16, chunk=3))
    with pytest.raises(AssertionError, match="values are"):
        attention(q, KVPages(scene.keys, scene.values[..., :8]), plan, scene.shape)
    with pytest.raises(AssertionError, match="queries are"):
        attention(q[:, :2], pages, plan, scene.shape)
    with pytest.raises(AssertionError, match="sinks are"):
        attention(q, pages, plan, scene.shape, q.new_zeros(3))
