"""The attention of the model families, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_kernels.gpu.compile_case import TARGETS, CompileCase
from moe_kernels.gpu.paged_attention.api import (
    attending_constants,
    config_of,
    form_constants,
    joining_constants,
)
from moe_kernels.gpu.paged_attention.heuristics import AttentionConfig, AttentionTile
from moe_kernels.gpu.paged_attention.kernel import attend_items, attend_tiles, join_items
from moe_kernels.gpu.paged_attention.wide_kernel import attend_wide_tiles
from moe_kernels.interface.attention_shape import AttentionShape
from moe_kernels.interface.kv_form import FLOATS, KVDtype, KVForm, kv_form

_PAGE_SIZE = 16
_STRIDES = tuple(
    f"{tensor}_{axis}_stride"
    for tensor, axes in (
        ("q", ("token", "head")),
        ("key", ("page", "head", "token")),
        ("value", ("page", "head", "token")),
    )
    for axis in axes
)
_SCALES = ("key_scales_ptr", "value_scales_ptr")
_OUT_STRIDES = ("out_token_stride", "out_head_stride")


def _grouped(heads: int, kv_heads: int, head_dim: int, **more: Any) -> AttentionShape:
    return AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **more)


def _latent(heads: int) -> AttentionShape:
    return AttentionShape(num_heads=heads, num_kv_heads=1, head_dim=576, value_dim=512)


_SHAPES = {
    "qwen3-30b-a3b": _grouped(32, 4, 128),
    "mixtral-8x7b": _grouped(32, 8, 128),
    "olmoe": _grouped(16, 16, 128),
    "gpt-oss-120b": _grouped(64, 8, 64, has_sinks=True),
    "gpt-oss-120b-window": _grouped(64, 8, 64, has_sinks=True, sliding_window=128),
    "llama-4-chunk": _grouped(40, 8, 128, chunk=8192),
    "glm-4.5": _grouped(96, 8, 128),
    "qwen3-next": _grouped(16, 2, 256),
    "value-128-of-192": _grouped(64, 4, 192, value_dim=128),
    "deepseek-v3": _latent(128),
    "deepseek-v2-lite": _latent(16),
}


def _case(
    name: str,
    shape: AttentionShape,
    kernel: str,
    config: AttentionConfig,
    tile: AttentionTile,
    targets: tuple[int, ...],
    form: KVForm = FLOATS,
) -> CompileCase:
    """Returns one of the three kernels for a shape and the chips that have this configuration."""
    is_latent, page = shape.head_dim == 576, "*bf16"
    page_type = {None: page, 8: "*i8", 4: "*u8"}[form.bits]
    scales = dict.fromkeys(_SCALES, None if form.bits is None else page)
    tables = {"tiles_ptr": "*i32", "tables_ptr": "*i32"}
    inputs = {"q_ptr": page, "keys_ptr": page_type, "values_ptr": page_type}
    inputs |= {name: kind for name, kind in scales.items() if kind is not None}
    partial = {"partial_ptr": "*fp32", "stats_ptr": "*fp32"}
    attending = {
        **attending_constants(shape, config, tile, _PAGE_SIZE),
        "IS_LATENT": is_latent,
        **form_constants(form, shape.value_width, max(1, form.num_scales(1 + is_latent))),
        **{name: None for name, kind in scales.items() if kind is None},
    }
    sinks = {"sinks_ptr": "*fp32"} if shape.has_sinks else {}
    no_sinks = {} if shape.has_sinks else {"sinks_ptr": None}
    strides = dict.fromkeys(("table_stride", *_STRIDES), "i32")
    out_strides = dict.fromkeys(_OUT_STRIDES, "i32")
    if kernel == "items":
        function, constants = attend_items, attending
        signature = {**inputs, **tables, "items_ptr": "*i32", **partial, "partial_rows": "i32"}
        signature |= {**strides, "scale_log2": "fp32"}
    elif kernel == "tiles":
        function, constants = attend_tiles, {**attending, **no_sinks}
        signature = {**inputs, **tables, **sinks, "out_ptr": page, "num_tiles": "i32"}
        signature |= {**strides, **out_strides, "scale_log2": "fp32"}
        if config.join_columns:
            function, scratch = attend_wide_tiles, {"scratch_ptr": "*fp32"}
            signature, constants = (
                signature | scratch,
                {**constants, "BLOCK_C": config.join_columns},
            )
    else:
        function, constants = join_items, {**joining_constants(shape, config), **no_sinks}
        signature = {**partial, "tiles_ptr": "*i32", **sinks, "out_ptr": page}
        signature |= {"partial_rows": "i32", "row_blocks": "i32", **out_strides}
    num_warps, num_stages = (constants.pop(name) for name in ("num_warps", "num_stages"))
    has_matrices = kernel != "join"
    return CompileCase(
        name=f"paged_attention/{kernel}-{name}" + ("" if 90 in targets else f"-sm{targets[0]}"),
        kernel=function,
        signature={name: signature[name] for name in function.arg_names if name in signature},
        constexprs=constants,
        num_warps=num_warps,
        num_stages=num_stages,
        targets=targets,
        divisible_by_16=tuple(name for name in signature if name.endswith("_stride")),
        has_tensor_cores=has_matrices,
        expects_wgmma=has_matrices and tile.block_m == 64,
    )


def _cases(name: str, shape: AttentionShape, form: KVForm = FLOATS) -> Iterator[CompileCase]:
    """Chips that share a configuration share its cases."""
    targets_of: dict[AttentionConfig, tuple[int, ...]] = {}
    for target in TARGETS:
        config = config_of(shape, torch.bfloat16, target // 10)
        targets_of[config] = (*targets_of.get(config, ()), target)
    for config, targets in targets_of.items():
        yield _case(name, shape, "items", config, config.items, targets, form)
        if form == FLOATS:  # it reads no pages
            yield _case(name, shape, "join", config, config.items, targets)
        if config.tiles is not None:
            yield _case(name, shape, "tiles", config, config.tiles, targets, form)


# Latents in 8 bits are not among them: their tiles spill, and were not tuned on a GPU.
_FEW_BITS: dict[str, tuple[KVDtype, ...]] = {
    "qwen3-30b-a3b": ("int8", "int4"),
    "gpt-oss-120b-window": ("int8", "int4"),
}
CASES: tuple[CompileCase, ...] = (
    *(case for name, shape in _SHAPES.items() for case in _cases(name, shape)),
    *(
        case
        for name, forms in _FEW_BITS.items()
        for form in forms
        for case in _cases(f"{name}-{form}", _SHAPES[name], kv_form(form))
    ),
)
