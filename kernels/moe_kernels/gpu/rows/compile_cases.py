"""The model widths of the families, for compilation ahead of time."""

from __future__ import annotations

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.rows.heuristics import row_config
from moe_kernels.gpu.rows.kernel import add_and_norm_rows

# OLMoE and Qwen3-30B-A3B, GPT-OSS, Mixtral and Qwen3-235B-A22B, DeepSeek-V3 and Kimi-K2.
_WIDTHS = (2048, 2880, 4096, 7168)
_STEPS = ("hidden_step", "out_step", "more_step")


def _case(width: int, dtype: str, is_adding: bool, is_norming: bool) -> CompileCase:
    config = row_config(width)
    name = "_and_".join(["add"] * is_adding + ["norm"] * is_norming)
    pointers: dict[str, str | None] = {
        "hidden_ptr": f"*{dtype}",
        "out_ptr": "*fp32" if is_adding else None,
        "more_ptr": "*fp32" if is_adding else None,
        "gate_ptr": None,
        "weight_ptr": f"*{dtype}" if is_norming else None,
        "sum_ptr": f"*{dtype}",
        "normed_ptr": f"*{dtype}",
    }
    return CompileCase(
        name=f"rows/{name}-{dtype}-{width}",
        kernel=add_and_norm_rows,
        signature={
            **{name: kind for name, kind in pointers.items() if kind is not None},
            **dict.fromkeys(_STEPS, "i32"),
            "multiplier": "fp32",
            "eps": "fp32",
        },
        constexprs={
            **{name: None for name, kind in pointers.items() if kind is None},
            "WIDTH": width,
            "BLOCK": config.block,
            "HAS_OUT": is_adding,
            "HAS_MORE": is_adding,
            "HAS_GATE": False,
            "HAS_NORM": is_norming,
        },
        num_warps=config.num_warps,
        num_stages=1,
        divisible_by_16=_STEPS,
    )


CASES = tuple(
    _case(width, dtype, is_adding, is_norming)
    for width in _WIDTHS
    for dtype in ("bf16", "fp16")
    for is_adding, is_norming in ((True, True), (True, False), (False, True))
    if dtype == "bf16" or (is_adding and is_norming)
)
