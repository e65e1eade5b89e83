"""The grouped products as they ship for known models: one case for each distinct configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moe_kernels.gpu.compile_case import TARGETS, CompileCase
from moe_kernels.gpu.grouped_gemm.heuristics import (
    BLOCK_MS,
    FIXED_BLOCK_M,
    FP8_BLOCK,
    ProductShape,
    TileConfig,
    WeightFormat,
    choose_tile,
)
from moe_kernels.gpu.grouped_gemm.kernel import combine_kernel, grouped_gemm_kernel
from moe_kernels.gpu.grouped_gemm.kernel_tma import grouped_gemm_tma_kernel
from moe_kernels.interface.kernels import GatedActivation

_GROUPED: tuple[tuple[WeightFormat, int], ...] = (
    ("int4", 128),
    ("int4", 32),
    ("int4_zero", 128),
    ("int4_zero", 32),
    ("int8_zero", 128),
)
_ROW_SCALED: tuple[tuple[WeightFormat, int], ...] = (("int8", 0), ("fp8_channel", 0))
_PLAIN: tuple[WeightFormat, int] = ("plain", 0)
# By format; published checkpoints keep the scales of groups in 16 bits.
_SCALES: dict[WeightFormat, str] = {
    "int8": "*fp32",
    "fp8_channel": "*fp32",
    "fp8_block": "*fp32",
    "int4": "*bf16",
    "int4_zero": "*fp16",
    "int8_zero": "*fp16",
    "mxfp4": "*u8",
}
# Each slot is a tile of its own. The omitted formats differ in their scales only.
_DIRECT_BLOCK_MS = (16, FIXED_BLOCK_M)
_DIRECT_FORMATS = (_PLAIN, ("fp8_block", FP8_BLOCK), ("mxfp4", 32), ("int4", 128))
_WITH_ADDITIONS = "qwen3-30b-a3b"  # those of adapters are compiled for this model
_PLAIN_ACTIVATION = GatedActivation()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    width: int
    expert_width: int
    formats: tuple[tuple[WeightFormat, int], ...]
    dtype: str = "bf16"
    has_bias: bool = False
    activation: GatedActivation = GatedActivation()
    bias_dtype: str = ""  # the model's where empty
    out_dtype: str = ""

    def shapes(self) -> Iterator[ProductShape]:
        for weight_format, group in self.formats:
            for is_gated in (True, False):
                widths = (self.width, self.expert_width)
                num_inputs, num_outputs = widths if is_gated else widths[::-1]
                yield ProductShape(
                    num_inputs=num_inputs,
                    num_outputs=num_outputs,
                    is_gated=is_gated,
                    weight_format=weight_format,
                    group=group,
                )


# DeepSeek-V3's ranks differ in the number of experts alone, which no configuration depends on.
MODELS = {
    "mixtral-8x7b": _Model(width=4096, expert_width=14336, formats=(_PLAIN,)),
    "qwen3-30b-a3b": _Model(
        width=2048,
        expert_width=768,
        formats=(_PLAIN, *_ROW_SCALED, ("fp8_block", FP8_BLOCK), *_GROUPED),
    ),
    "deepseek-v3": _Model(
        width=7168, expert_width=2048, formats=(_PLAIN, ("fp8_block", FP8_BLOCK))
    ),
    "gpt-oss-120b": _Model(
        width=2880,
        expert_width=2880,
        formats=(_PLAIN, ("mxfp4", 32)),
        has_bias=True,
        activation=GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0),
    ),
    "olmoe": _Model(width=2048, expert_width=1024, formats=(_PLAIN,)),
    "olmoe-fp16": _Model(width=2048, expert_width=1024, formats=(_PLAIN,), dtype="fp16"),
}


# The projections of routers, whose logits leave in fp32; Mixtral has only 8. Where bf16 does not
# hold a router's weights, all is fp32. Other linears are the second products of the models above.
_ROUTER = _Model(width=2048, expert_width=128, formats=(_PLAIN,), out_dtype="fp32")
ROUTERS = {
    "router": _ROUTER,
    "router-of-8": replace(_ROUTER, expert_width=8),
    "router-bias": replace(_ROUTER, has_bias=True, bias_dtype="fp32"),
    "router-fp32": replace(_ROUTER, dtype="fp32"),
}


def _cases() -> Iterator[CompileCase]:
    """Yields each configuration once, under the first model that has it, with its targets."""
    seen = set()
    for model_name, model in MODELS.items():
        for shape in model.shapes():
            activation = model.activation if shape.is_gated else _PLAIN_ACTIVATION
            own = (shape.weight_format, shape.group, shape.is_gated, model.dtype, model.has_bias)
            is_even = shape.num_inputs % shape.block_c == 0
            for tile, targets in _tiles(shape):
                key = (*own, is_even, activation, tile, targets)
                if key not in seen:
                    seen.add(key)
                    yield from _cases_of(model_name, model, shape, tile, targets)
    for name, router in ROUTERS.items():
        shape = ProductShape(
            num_inputs=router.width,
            num_outputs=router.expert_width,
            is_gated=False,
            item_bytes=4 if router.dtype == "fp32" else 2,
        )
        for tile, targets in _tiles(shape):
            yield from _cases_of(name, router, shape, tile, targets, can_be_direct=False)
    yield from _added_cases()
    for top_k in (1, 2, 4, 8):
        yield _combine_case(f"combine-{top_k}", top_k, "*fp32")
        yield _combine_case(f"combine-partial-{top_k}", top_k, "*fp64")


def _added_cases() -> Iterator[CompileCase]:
    """Yields the products to which adapters add, for the experts of one model."""
    model = MODELS[_WITH_ADDITIONS]
    for shape in model.shapes():
        for tile, targets in _tiles(shape) if shape.weight_format == "plain" else ():
            if tile.block_m > FIXED_BLOCK_M:
                continue
            product = "gate_up" if shape.is_gated else "down"
            name = f"grouped_gemm/{product}-added-{tile.block_m}x{tile.block_n}-{_WITH_ADDITIONS}"
            yield _case(name, model, shape, tile, targets, has_added=True)
            direct = f"{name}-direct"
            yield _case(direct, model, shape, tile, targets, has_added=True, is_direct=True)


def _tiles(shape: ProductShape) -> Iterator[tuple[TileConfig, tuple[int, ...]]]:
    """Returns the tiles of a product, each with its chips."""
    for block_m in BLOCK_MS:
        tiles = {target: choose_tile(block_m, shape, target) for target in TARGETS}
        for tile in dict.fromkeys(tiles.values()):
            yield tile, tuple(target for target in TARGETS if tiles[target] == tile)


def _combine_case(name: str, top_k: int, out: str) -> CompileCase:
    return CompileCase(
        name=f"grouped_gemm/{name}",
        kernel=combine_kernel,
        signature={
            "y_ptr": "*bf16",
            "ids_ptr": "*i64",
            "weights_ptr": "*fp32",
            "out_ptr": out,
            "num_experts": "i32",
            "width": "i32",
        },
        constexprs={"TOP_K": top_k, "BLOCK_D": 1024},
        num_warps=4,
        num_stages=3,
        divisible_by_16=("width",),
    )


def _cases_of(
    model_name: str,
    model: _Model,
    shape: ProductShape,
    tile: TileConfig,
    targets: tuple[int, ...],
    can_be_direct: bool = True,
) -> Iterator[CompileCase]:
    product = "gate_up" if shape.is_gated else "linear" if model_name in ROUTERS else "down"
    weights = shape.weight_format + (f"-g{shape.group}" if shape.group else "")
    size = f"{tile.block_m}x{tile.block_n}x{tile.block_c}" + ("-tma" if tile.uses_tma else "")
    size += f"-w{tile.num_warps}s{tile.num_stages}"
    name = f"grouped_gemm/{product}-{weights}-{size}-{model_name}"
    if tile.uses_tma:
        yield _tma_case(name, model, shape, tile, targets)
        return
    is_fp8 = shape.weight_format.startswith("fp8")
    # Chips from 89 on convert e4m3 themselves.
    able = tuple(target for target in targets if is_fp8 and target >= 89)
    others = tuple(target for target in targets if target not in able)
    for chips, has_fp8 in ((able, True), (others, False)):
        if not chips:
            continue
        own = name + ("-bits" if is_fp8 and not has_fp8 else "")
        yield _case(own, model, shape, tile, chips, has_fp8=has_fp8)
        has_direct = can_be_direct and (shape.weight_format, shape.group) in _DIRECT_FORMATS
        if has_direct and tile.block_m in _DIRECT_BLOCK_MS:
            yield _case(own + "-direct", model, shape, tile, chips, has_fp8=has_fp8, is_direct=True)


def _case(
    name: str,
    model: _Model,
    shape: ProductShape,
    tile: TileConfig,
    targets: tuple[int, ...],
    *,
    has_fp8: bool = False,
    is_direct: bool = False,
    has_added: bool = False,
) -> CompileCase:
    weights, pointer = shape.weight_format, f"*{model.dtype}"
    types = {"plain": pointer, "int8": "*i8"}
    signature = {
        "x_ptr": pointer,
        "weight_ptr": types.get(weights, "*u8"),
        "scales_ptr": _SCALES.get(weights),
        "zeros_ptr": "*u8" if weights.endswith("_zero") else None,
        "bias_ptr": _bias_pointer(model),
        "added_ptr": "*fp32" if has_added else None,
        "added_ids_ptr": "*i64" if has_added else None,
        "out_ptr": f"*{model.out_dtype or model.dtype}",
        "tile_experts_ptr": "*i64" if is_direct else "*i32",
        "sorted_slots_ptr": None if is_direct else "*i32",
        "num_tiles_ptr": None if is_direct else "*i32",
        **dict.fromkeys(("max_tiles", "num_slots", "num_experts", "top_k"), "i32"),
        **dict.fromkeys(("num_inputs", "num_outputs", "weight_stride", "scales_stride"), "i32"),
    }
    return CompileCase(
        name=name,
        kernel=grouped_gemm_kernel,
        signature={argument: kind for argument, kind in signature.items() if kind},
        constexprs={
            **{argument: None for argument, kind in signature.items() if not kind},
            **_common(model, shape, tile),
            "FORMAT": weights,
            "GROUP_C": shape.group,
            "IS_DIRECT": is_direct,
            "HAS_FP8": has_fp8,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=targets,
        divisible_by_16=(*_divisible(shape), "weight_stride"),
        has_tensor_cores=model.dtype != "fp32",
        expects_wgmma=model.dtype != "fp32",
    )


def _tma_case(
    name: str, model: _Model, shape: ProductShape, tile: TileConfig, targets: tuple[int, ...]
) -> CompileCase:
    bias = _bias_pointer(model)
    blocks = f"tensordesc<{model.dtype}[{{}}, {tile.block_c}]>"
    signature = {
        "x": f"*{model.dtype}" if shape.is_gated else blocks.format(tile.block_m),
        "weight": blocks.format(tile.block_n),
        **({"bias_ptr": bias} if bias else {}),
        "out_ptr": f"*{model.out_dtype or model.dtype}",
        **dict.fromkeys(("tile_experts_ptr", "sorted_slots_ptr", "num_tiles_ptr"), "*i32"),
        **dict.fromkeys(("num_slots", "top_k", "num_inputs", "num_outputs"), "i32"),
    }
    return CompileCase(
        name=name,
        kernel=grouped_gemm_tma_kernel,
        signature=signature,
        constexprs={
            **_common(model, shape, tile),
            **({} if bias else {"bias_ptr": None}),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        targets=targets,
        divisible_by_16=_divisible(shape),
        has_tensor_cores=model.dtype != "fp32",
        expects_wgmma=model.dtype != "fp32",
    )


def _bias_pointer(model: _Model) -> str | None:
    return f"*{model.bias_dtype or model.dtype}" if model.has_bias else None


def _divisible(shape: ProductShape) -> tuple[str, ...]:
    sizes = {"num_inputs": shape.num_inputs, "num_outputs": shape.num_outputs}
    return tuple(name for name, size in sizes.items() if size % 16 == 0)


def _common(model: _Model, shape: ProductShape, tile: TileConfig) -> dict[str, object]:
    activation = model.activation if shape.is_gated else _PLAIN_ACTIVATION
    return {
        "IS_GATED": shape.is_gated,
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit,
        "UP_OFFSET": activation.up_offset,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_C": tile.block_c,
        "GROUP_M": tile.group_m,
        "IS_EVEN": shape.num_inputs % tile.block_c == 0,
    }


CASES: tuple[CompileCase, ...] = tuple(_cases())
