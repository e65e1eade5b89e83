"""The plan of a step and the choice of tiles: arrays worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_kernels.gpu.paged_attention import launch_plan as plan_module
from moe_kernels.gpu.paged_attention.api import config_of
from moe_kernels.gpu.paged_attention.compile_cases import CASES
from moe_kernels.gpu.paged_attention.launch_plan import (
    Slab,
    decode_sizes,
    partial_rows,
    plan_paged_attention,
    plan_sizes,
)
from moe_kernels.graphs.graph_sizes import GraphSize
from moe_kernels.interface.attention_shape import AttentionShape, DecodeRoom, StepRows

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128)  # 8 tokens x 8 heads a tile
# A token at position 517, a chunk of 40 from 100 on, and 2 tokens at 255 and 256.
STEP = StepRows(
    np.array([1, 40, 2]), np.array([517, 100, 255]),
    [list(range(1, 34)), list(range(40, 49)), list(range(60, 77))], 16,
)  # fmt: skip


def test_decode_becomes_items_and_prefill_tiles() -> None:
    config = config_of(SHAPE, torch.bfloat16)
    assert (config.split_tokens, config.items.tile_tokens) == (256, 8)
    plan = plan_paged_attention(STEP, SHAPE, config, CPU)
    assert plan.tables_SW.shape == (3, 48), "33 pages, in splits of 16"
    assert plan.tables_SW[1].tolist() == [*range(40, 49), *[0] * 39]
    # sequence, first token, tokens, first position, first item, items
    assert plan.item_tiles_N.tolist() == [[0, 0, 1, 517, 0, 3], [2, 41, 2, 255, 3, 2]]
    assert plan.items_I.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert plan.tiles_M.tolist() == [
        [1, 1 + 8 * i, 8, 100 + 8 * i, 0, 0] for i in (4, 3, 2, 1, 0)
    ], "most keys first"
    assert plan.slabs == (Slab(0, 2, 0, 5),)
    assert partial_rows(plan.sizes, config) == 2 * 8


@pytest.mark.parametrize(
    ("more", "splits"),
    [({"sliding_window": 6}, [2]), ({"sliding_window": 7}, [1, 2]), ({"chunk": 300}, [1, 2])],
)
def test_splits_that_no_row_sees_are_no_items(more: dict[str, int], splits: list[int]) -> None:
    shape = replace(SHAPE, **more)
    step = StepRows(np.array([1]), np.array([517]), [list(range(33))], 16)
    plan = plan_paged_attention(step, shape, config_of(shape, torch.bfloat16), CPU)
    assert plan.items_I[:, 1].tolist() == splits


def test_slabs_have_tiles_and_items_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(SHAPE, torch.bfloat16)
    step = StepRows(np.ones(3, dtype=np.int64), np.array([517, 100, 255]), STEP.page_tables, 16)
    item_bytes = 32 * (128 + 2) * 4
    monkeypatch.setattr(plan_module, "MAX_PARTIAL_BYTES", 4 * item_bytes)
    plan = plan_paged_attention(step, SHAPE, config, CPU)
    assert plan.slabs == (Slab(0, 2, 0, 4), Slab(2, 1, 4, 1))
    assert plan.item_tiles_N[:, 4].tolist() == [0, 3, 0], "counted from the slab's first"
    assert plan.items_I[:, 0].tolist() == [0, 0, 0, 1, 0]
    monkeypatch.setattr(plan_module, "MAX_PARTIAL_BYTES", 1)
    assert len(plan_paged_attention(step, SHAPE, config, CPU).slabs) == 3


LATENT = AttentionShape(num_heads=128, num_kv_heads=1, head_dim=576, value_dim=512)
WINDOWED = AttentionShape(num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=128)


@pytest.mark.parametrize(
    ("shape", "rows", "context", "most", "items", "mib"),
    [
        (SHAPE, 64, 512, 40960, 191, 3),  # Qwen3-30B-A3B: splits of 256
        (SHAPE, 64, 8192, 40960, 2111, 33),
        (SHAPE, 64, 40960, 40960, 10240, 162),  # no more than all rows at their longest
        (SHAPE, 1, 40960, 40960, 160, 3),
        (WINDOWED, 64, 131072, 131072, 128, 2),  # GPT-OSS: a window touches two splits
        (LATENT, 64, 8192, 163840, 1087, 273),  # DeepSeek-V3
    ],
)
def test_room_for_any_decode_step(
    shape: AttentionShape, rows: int, context: int, most: int, items: int, mib: int
) -> None:
    """The workspace has the size that docs/internals/kernels.md gives."""
    config = config_of(shape, torch.bfloat16)
    sizes = decode_sizes(room_of(rows, context, most), shape, config)
    assert sizes is not None and sizes.num_items == items, f"{sizes}"
    assert (sizes.num_sequences, sizes.num_item_tiles, sizes.num_tiles) == (rows, rows, 0)
    assert sizes.table_width * 16 >= most > (sizes.table_width * 16 - config.split_tokens)
    programs = items * shape.num_kv_heads * config.head_blocks
    workspace = programs * partial_rows(sizes, config) * (shape.value_width + 2) * 4
    assert round(workspace / 2**20) == mib, f"{workspace / 2**20} MiB"


def test_no_room_beyond_a_slab() -> None:
    config = config_of(LATENT, torch.bfloat16)
    assert decode_sizes(room_of(64, 32768, 163840), LATENT, config) is None
    assert decode_sizes(room_of(24, 32768, 163840), LATENT, config) is not None


def test_every_step_of_a_room_fits() -> None:
    rng = np.random.default_rng(1)
    for shape in (SHAPE, replace(SHAPE, sliding_window=300), replace(SHAPE, chunk=700)):
        config = config_of(shape, torch.bfloat16)
        sizes = decode_sizes(room_of(6, 512, 2000), shape, config)
        assert sizes is not None
        for _ in range(200):
            keys = rng.integers(1, 2001, 6)
            while keys.sum() > 6 * 512:
                keys = np.maximum(1, keys * 3 // 4)
            tables = [[0] * -(-int(count) // 16) for count in keys]
            step = StepRows(np.ones(6, dtype=np.int64), keys - 1, tables, 16)
            assert plan_sizes(step, shape, config).fits(sizes), f"{keys} in {sizes}"


def room_of(rows: int, context: int, most: int) -> DecodeRoom:
    return DecodeRoom(size=GraphSize(rows, context), max_positions=most, page_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chip", [8, 9, 10, 12])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 12, 16, 64, 71, 128])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (80, 80), (192, 128), (256, 256), (576, 512)]
)
def test_tiles_hold_every_head_and_width(
    group: int, head_dim: int, value_dim: int, dtype: torch.dtype, chip: int
) -> None:
    shape = AttentionShape(
        num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, value_dim=value_dim
    )
    config = config_of(shape, dtype, chip)
    tile = config.items
    assert config.head_blocks * tile.block_heads >= group > (config.head_blocks - 1) * 16
    assert 0 < tile.tile_tokens * tile.block_heads <= tile.block_m
    assert config.block_d + (config.block_r if config.block_d < head_dim else 0) >= head_dim
    assert config.block_v >= value_dim
    assert config.split_tokens % tile.block_n == 0 and tile.block_n % 16 == 0
    if config.tiles is not None:
        tiles = replace(config.tiles, num_stages=tile.num_stages)
        assert tiles == tile, "decode and prefill must add in one order"
    assert (config.tiles is None) == (chip == 10 and max(head_dim, value_dim) > 256)
    assert config.join_columns == 0 or config.block_v % config.join_columns == 0
    assert config.max_item_tokens >= 4 * tile.tile_tokens


def test_compile_cases_give_every_argument() -> None:
    for case in CASES:
        known = set(case.signature) | set(case.constexprs)
        assert known == set(case.kernel.arg_names), f"{case.name}: {known}"
