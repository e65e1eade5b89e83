"""Paged attention on a GPU: the one call, its checks and its launches.

T tokens, H query heads, Hkv key/value heads, D head width, Dv values' width.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_kernels.gpu.paged_attention.heuristics import (
    AttentionConfig,
    AttentionTile,
    attention_config,
)
from moe_kernels.gpu.paged_attention.kernel import attend_items, attend_tiles, join_items
from moe_kernels.gpu.paged_attention.launch_plan import (
    PagedPlan,
    PlanSizes,
    Slab,
    decode_sizes,
    partial_rows,
    plan_paged_attention,
)
from moe_kernels.gpu.paged_attention.wide_kernel import attend_wide_tiles
from moe_kernels.interface.attention_shape import AttentionShape, DecodeRoom, StepRows
from moe_kernels.interface.kv_form import KVForm, KVPages

LOG2_E = 1.4426950408889634


def plan_attention(
    step: StepRows,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    sizes: PlanSizes | None = None,
) -> PagedPlan:
    """Plans a step for pages of this dtype, in the tiles of its shape; see plan.py for `sizes`."""
    return plan_paged_attention(
        step, shape, config_of(shape, dtype, chip_of(device)), device, sizes
    )


def plan_room(
    room: DecodeRoom, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> PagedPlan | None:
    """Returns a plan that any decode step of the room fits in, empty so far; None: see
    `decode_sizes`."""
    sizes = decode_sizes(room, shape, config_of(shape, dtype, chip_of(device)))
    if sizes is None:
        return None
    none = np.zeros(0, dtype=np.int64)
    return plan_attention(StepRows(none, none, (), room.page_size), shape, dtype, device, sizes)


def chip_of(device: torch.device) -> int:
    """Returns the major compute capability; without a GPU, that of the tiles which are tested
    there."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def config_of(shape: AttentionShape, dtype: torch.dtype, chip: int = 9) -> AttentionConfig:
    """Returns the tiles of an attention shape."""
    return attention_config(
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        value_dim=shape.value_width,
        element_bytes=dtype.itemsize,
        chip=chip,
    )


def attention(
    q_THD: Tensor,
    pages: KVPages,
    plan: PagedPlan,
    shape: AttentionShape,
    sinks_H: Tensor | None = None,
    out_THV: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over each token's visible keys -> [T, H, Dv] in that dtype.

    The pages hold the step's own tokens already. Queries of any dtype and any strides but the last
    are rounded to the pages' dtype, and so are the weights of the values; sums are fp32. Pages in
    few bits are read in the dtype of the queries, which are rotated already where keys are.
    `sinks_H` in fp32: one more logit of each head, without a value.

    A row's result depends on that row alone. Rows that the plan does not have are not written.
    """
    _check(q_THD, pages, plan, shape, sinks_H)
    if out_THV is None:
        size = (q_THD.shape[0], shape.num_heads, shape.value_width)
        dtype = pages.keys.dtype if pages.form.bits is None else q_THD.dtype
        out_THV = torch.empty(size, dtype=dtype, device=q_THD.device)
    assert out_THV.stride(-1) == 1, f"the output's rows are not contiguous: {out_THV.stride()}"
    for slab in plan.slabs:
        _launch_slab(q_THD, pages, plan, slab, sinks_H, out_THV)
    if plan.sizes.num_tiles:
        _launch_tiles(q_THD, pages, plan, sinks_H, out_THV)
    return out_THV


def _check(
    q_THD: Tensor,
    pages: KVPages,
    plan: PagedPlan,
    shape: AttentionShape,
    sinks_H: Tensor | None,
) -> None:
    heads, kv_heads, page_size = shape.num_heads, shape.num_kv_heads, plan.page_size
    assert plan.shape == shape, f"the plan is of {plan.shape}, not of {shape}"
    assert shape.scale > 0, f"a softmax scale of {shape.scale} turns maxima into minima"
    assert q_THD.shape[1:] == (heads, shape.head_dim), f"queries are {tuple(q_THD.shape)}"
    keys, values, form = pages.keys, pages.values, pages.form
    for name, rows, width in (
        ("keys", keys, form.row_width(shape.head_dim)),
        ("values", values, form.row_width(shape.value_width)),
    ):
        is_right = rows.shape[1:] == (kv_heads, page_size, width) and rows.stride(-1) == 1
        assert is_right, f"{name} are {tuple(rows.shape)} with strides {rows.stride()}"
    assert q_THD.stride(-1) == 1, f"queries' rows are not contiguous: {q_THD.stride()}"
    assert keys.dtype == values.dtype, f"keys are {keys.dtype}, values {values.dtype}"
    if sinks_H is not None:
        is_right = sinks_H.dtype == torch.float32 and sinks_H.shape == (heads,)
        assert is_right and sinks_H.is_contiguous(), f"sinks are {sinks_H.dtype}, {sinks_H.shape}"


def _launch_slab(
    q_THD: Tensor,
    pages: KVPages,
    plan: PagedPlan,
    slab: Slab,
    sinks_H: Tensor | None,
    out_THV: Tensor,
) -> None:
    """Items into a workspace, and the items of each tile joined."""
    config, shape = plan.config, plan.shape
    num_rows = partial_rows(plan.sizes, config)
    head_programs = shape.num_kv_heads * config.head_blocks
    rows = slab.num_items * head_programs * num_rows
    device = q_THD.device
    partial = torch.empty((rows, shape.value_width), dtype=torch.float32, device=device)
    stats = torch.empty((rows, 2), dtype=torch.float32, device=device)
    tiles = plan.item_tiles_N[slab.first_tile : slab.first_tile + slab.num_tiles]
    items = plan.items_I[slab.first_item : slab.first_item + slab.num_items]
    attend_items[(slab.num_items * head_programs,)](
        q_THD, pages.keys, pages.values, pages.key_scales, pages.value_scales, tiles, items,
        plan.tables_SW, partial, stats, num_rows, plan.sizes.table_width, *q_THD.stride()[:2],
        *pages.keys.stride()[:3], *pages.values.stride()[:3], shape.scale * LOG2_E,
        **page_constants(pages, config),
        **attending_constants(shape, config, config.items, plan.page_size),
    )  # fmt: skip
    row_blocks = -(-num_rows // config.join_rows)
    join_items[(slab.num_tiles * head_programs * row_blocks,)](
        partial, stats, tiles, sinks_H, out_THV, num_rows, row_blocks, *out_THV.stride()[:2],
        **joining_constants(shape, config),
    )  # fmt: skip


def _launch_tiles(
    q_THD: Tensor,
    pages: KVPages,
    plan: PagedPlan,
    sinks_H: Tensor | None,
    out_THV: Tensor,
) -> None:
    config, shape, num_tiles = plan.config, plan.shape, plan.sizes.num_tiles
    assert config.tiles is not None, "tiles of a shape that is served by items alone"
    keys, values = pages.keys, pages.values
    steps = (*q_THD.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *out_THV.stride()[:2])
    constants = attending_constants(shape, config, config.tiles, plan.page_size)
    constants |= page_constants(pages, config)
    num_programs = shape.num_kv_heads * config.head_blocks * num_tiles
    if not config.join_columns:
        attend_tiles[(num_programs,)](
            q_THD, keys, values, pages.key_scales, pages.value_scales, plan.tiles_M, plan.tables_SW,
            sinks_H, out_THV, num_tiles, plan.sizes.table_width, *steps, shape.scale * LOG2_E,
            **constants,
        )  # fmt: skip
        return
    num_programs = min(num_programs, num_processors(q_THD.device))
    size = (num_programs, 2, config.tiles.block_m, config.block_v)
    scratch = torch.empty(size, dtype=torch.float32, device=q_THD.device)
    attend_wide_tiles[(num_programs,)](
        q_THD, keys, values, pages.key_scales, pages.value_scales, plan.tiles_M, plan.tables_SW,
        sinks_H, scratch, out_THV, num_tiles, plan.sizes.table_width, *steps, shape.scale * LOG2_E,
        BLOCK_C=min(config.join_columns, config.block_v), **constants,
    )  # fmt: skip


@functools.cache
def num_processors(device: torch.device) -> int:
    """Programs that run at once, each with a scratch; without a GPU a few, so that they repeat."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_latent(keys: Tensor, values: Tensor, config: AttentionConfig) -> bool:
    """Checks if the values are the first part of the keys; the kernel then loads them once."""
    is_same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    return is_same and values.shape[-1] == config.block_d and keys.shape[-1] >= config.block_d


def page_constants(pages: KVPages, config: AttentionConfig) -> dict[str, Any]:
    """Returns the constants of the pages' form."""
    num_scales = 1 if pages.key_scales is None else pages.key_scales.shape[-1]
    return {
        "IS_LATENT": is_latent(pages.keys, pages.values, config),
        **form_constants(pages.form, pages.values.shape[-1], num_scales),
    }


def form_constants(form: KVForm, value_width: int, num_scales: int) -> dict[str, Any]:
    """Returns the constants of pages of a form. In 8 bits the two scales of a latent key belong to
    its values and to the rest."""
    has_parts = form.bits == 8 and num_scales == 2
    return {
        "SPLIT": value_width if has_parts else 0,
        "BITS": form.bits or 0,
        "SCALES": num_scales,
    }


def attending_constants(
    shape: AttentionShape,
    config: AttentionConfig,
    tile: AttentionTile,
    page_size: int,
) -> dict[str, Any]:
    """Returns the constants of attend_items and of both kernels of tiles, but for those of the
    pages."""
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": shape.value_width,
        "WINDOW": shape.sliding_window or 0,
        "CHUNK": shape.chunk or 0,
        "PAGE": page_size,
        "SPLIT_TOKENS": config.split_tokens,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": config.block_d,
        "BLOCK_R": config.block_r,
        "BLOCK_V": config.block_v,
        "BLOCK_HEADS": tile.block_heads,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def joining_constants(shape: AttentionShape, config: AttentionConfig) -> dict[str, Any]:
    """Returns the constants of join_items."""
    return {
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "VALUE_DIM": shape.value_width,
        "BLOCK_HEADS": config.items.block_heads,
        "BLOCK_ROWS": config.join_rows,
        "BLOCK_V": config.block_v,
        "num_warps": 4,
        "num_stages": 1,
    }
