"""The model widths of the families, for compilation ahead of time."""

from __future__ import annotations

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.rows.heuristics import row_config
from moe_kernels.gpu.rows.kernel import add_and_norm_rows

# OLMoE and Qwen3-30B-A3B, GPT-OSS, Mixtral and Qwen3-235B-A22B, DeepSeek-V3 and Kimi-K2.
_WIDTHS = (2048, 2880, 4096, 7168)
_QUERY_WIDTHS = (1536,)  # compressed queries of DeepSeek-V3 and Kimi-K2
_STEPS = ("hidden_step", "out_step", "more_step")


def _case(width: int, dtype: str, num_added: int, is_norming: bool) -> CompileCase:
    config = row_config(width)
    name = "_and_".join(
        [("", "add", "add_two")[num_added]] * (num_added > 0) + ["norm"] * is_norming
    )
    pointers: dict[str, str | None] = {
        "hidden_ptr": f"*{dtype}",
        "out_ptr": "*fp32" if num_added else None,
        "more_ptr": "*fp32" if num_added == 2 else None,
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
            "HAS_OUT": num_added > 0,
            "HAS_MORE": num_added == 2,
            "HAS_GATE": False,
            "HAS_NORM": is_norming,
        },
        num_warps=config.num_warps,
        num_stages=1,
        divisible_by_16=_STEPS,
    )


CASES = (
    *(
        _case(width, "bf16", num_added, is_norming)
        for width in _WIDTHS
        for num_added, is_norming in ((1, False), (2, False), (0, True), (2, True))
    ),
    *(_case(width, "fp16", 2, True) for width in _WIDTHS),
    *(_case(width, "bf16", 0, True) for width in _QUERY_WIDTHS),
)
