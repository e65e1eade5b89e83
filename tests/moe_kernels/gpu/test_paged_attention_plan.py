"""The plan of a step and the choice of tiles: arrays worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_kernels.attention_shape import AttentionShape, StepTokens
from moe_kernels.gpu.paged_attention import plan as plan_module
from moe_kernels.gpu.paged_attention.api import config_of
from moe_kernels.gpu.paged_attention.compile_cases import CASES
from moe_kernels.gpu.paged_attention.plan import Slab, partial_rows, plan_paged_attention

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128)  # 8 tokens x 8 heads a tile
# A token at position 517, a chunk of 40 from 100 on, and 2 tokens at 255 and 256.
STEP = StepTokens(
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
    step = StepTokens(np.array([1]), np.array([517]), [list(range(33))], 16)
    plan = plan_paged_attention(step, shape, config_of(shape, torch.bfloat16), CPU)
    assert plan.items_I[:, 1].tolist() == splits


def test_slabs_have_tiles_and_items_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(SHAPE, torch.bfloat16)
    step = StepTokens(np.ones(3, dtype=np.int64), np.array([517, 100, 255]), STEP.page_tables, 16)
    item_bytes = 32 * (128 + 2) * 4
    monkeypatch.setattr(plan_module, "MAX_PARTIAL_BYTES", 4 * item_bytes)
    plan = plan_paged_attention(step, SHAPE, config, CPU)
    assert plan.slabs == (Slab(0, 2, 0, 4), Slab(2, 1, 4, 1))
    assert plan.item_tiles_N[:, 4].tolist() == [0, 3, 0], "counted from the slab's first"
    assert plan.items_I[:, 0].tolist() == [0, 0, 0, 1, 0]
    monkeypatch.setattr(plan_module, "MAX_PARTIAL_BYTES", 1)
    assert len(plan_paged_attention(step, SHAPE, config, CPU).slabs) == 3


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
