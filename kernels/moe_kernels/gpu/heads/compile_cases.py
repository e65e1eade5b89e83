"""The attention shapes of the families, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.heads.api import norm_code
from moe_kernels.gpu.heads.heuristics import head_config
from moe_kernels.gpu.heads.kernel import shape_heads, shape_latents
from moe_kernels.gpu.heads.kv_rows import quantise_rows, rotate_rows
from moe_kernels.interface.attention_shape import AttentionShape

_SHAPES = {
    "mixtral": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen3-30b-a3b": AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head"),
    "gpt-oss-120b": AttentionShape(num_heads=64, num_kv_heads=8, head_dim=64),
    "olmoe": AttentionShape(num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="row"),
    "clipped": AttentionShape(num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="row", clip=8.0),
    "glm-4.5": AttentionShape(
        num_heads=96, num_kv_heads=8, head_dim=128, rotary_dim=64, qk_norm="head"
    ),
    "hunyuan": AttentionShape(
        num_heads=32, num_kv_heads=8, head_dim=128, qk_norm="head", is_norm_after_rotation=True
    ),
    "narrow-values": AttentionShape(
        num_heads=64, num_kv_heads=4, head_dim=192, value_dim=128, rotary_dim=64
    ),
    "llama4": AttentionShape(num_heads=40, num_kv_heads=8, head_dim=128),  # with a query scale
}
_INPUTS = {
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "positions_ptr": "*i64",
    "kv_rows_ptr": "*i64",
}


def _case(name: str, shape: AttentionShape, dtype: str) -> CompileCase:
    config = head_config(shape.num_heads, shape.head_dim, shape.value_width)
    has_scale = name == "llama4"
    optional: dict[str, str] = {}
    if shape.qk_norm != "none":
        optional |= {"q_norm_ptr": f"*{dtype}", "k_norm_ptr": f"*{dtype}"}
    if has_scale:
        optional |= {"query_scale_ptr": "*fp32"}
    rows = {f"{name}_ptr": f"*{dtype}" for name in ("qkv", "q", "keys", "values")}
    return CompileCase(
        name=f"heads/{name}-{dtype}",
        kernel=shape_heads,
        signature=rows | optional | _INPUTS | {"qkv_step": "i32", "eps": "fp32", "clip": "fp32"},
        constexprs={
            **{
                name: None
                for name in ("q_norm_ptr", "k_norm_ptr", "query_scale_ptr")
                if name not in optional
            },
            "NUM_HEADS": shape.num_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_DIM": shape.head_dim,
            "VALUE_DIM": shape.value_width,
            "ROTARY_DIM": shape.num_rotated,
            "NORM": norm_code(shape),
            "HAS_CLIP": shape.clip is not None,
            "HAS_QUERY_SCALE": has_scale,
            "BLOCK_H": config.block_heads,
            "BLOCK_D": config.block_dim,
            "BLOCK_V": config.block_value_dim,
        },
        num_warps=config.num_warps,
        num_stages=1,
        divisible_by_16=("qkv_step",),
    )


def _latent_case(dtype: str) -> CompileCase:
    """DeepSeek-V2, DeepSeek-V3 and Kimi-K2."""
    config = head_config(128, 64, 64)
    names = ("q_latent", "q_rope", "latent", "norm", "q", "keys")
    rows = {f"{name}_ptr": f"*{dtype}" for name in names}
    steps = (
        "q_latent_token_step",
        "q_latent_head_step",
        "q_rope_token_step",
        "q_rope_head_step",
        "latent_step",
    )
    return CompileCase(
        name=f"heads/deepseek-v3-latent-{dtype}",
        kernel=shape_latents,
        signature=rows | _INPUTS | dict.fromkeys(steps, "i32") | {"eps": "fp32"},
        constexprs={
            "NUM_HEADS": 128,
            "LATENT_DIM": 512,
            "ROPE_DIM": 64,
            "BLOCK_H": config.block_heads,
            "BLOCK_R": config.block_dim,
            "BLOCK_L": 512,
        },
        num_warps=config.num_warps,
        num_stages=1,
        divisible_by_16=steps,
    )


def _row_cases() -> Iterator[CompileCase]:
    """Yields the rows of 128 values in few bits, and the latent of DeepSeek-V3."""
    steps = ("x_step", "numbers_step", "scales_step")
    for bits, width in ((8, 128), (4, 128), (8, 512), (8, 64)):
        yield CompileCase(
            name=f"heads/quantise-{bits}-{width}",
            kernel=quantise_rows,
            signature={
                "x_ptr": "*fp32",
                "rows_ptr": "*i64",
                "numbers_ptr": "*i8" if bits == 8 else "*u8",
                "scales_ptr": "*bf16",
                **dict.fromkeys(steps, "i32"),
            },
            constexprs={"WIDTH": width, "BITS": bits, "BLOCK": width // 2},
            num_warps=4,
            num_stages=1,
            divisible_by_16=("x_step", "numbers_step"),
        )
    for dtype in ("fp32", "bf16"):
        yield CompileCase(
            name=f"heads/rotate-{dtype}",
            kernel=rotate_rows,
            signature={"x_ptr": "*fp32", "out_ptr": f"*{dtype}", "factor": "fp32"},
            constexprs={"WIDTH": 128, "ROTATION": 128},
            num_warps=4,
            num_stages=1,
        )


CASES = (
    *(_case(name, shape, dtype) for name, shape in _SHAPES.items() for dtype in ("bf16", "fp16")),
    *(_latent_case(dtype) for dtype in ("bf16", "fp16")),
    *_row_cases(),
)
