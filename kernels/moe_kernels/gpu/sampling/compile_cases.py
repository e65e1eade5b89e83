"""The vocabularies of the families, for compilation ahead of time."""

from __future__ import annotations

from typing import Any

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.sampling import cut_kernel, kernel, logits_kernel
from moe_kernels.gpu.sampling.heuristics import SamplingConfig, sampling_config

# Blocks of 512, 1024, 2048 and 4096 tokens; GPT-OSS has Qwen3's. Vocabularies of one size of block
# differ in bounds and masks alone.
_VOCABULARIES = {"mixtral": 32_000, "olmoe": 50_304, "deepseek": 129_280, "qwen3": 151_936}
_TYPES = {
    "logits": "*fp32",
    "temperatures": "*fp32",
    "tops": "*fp32",
    "places": "*i32",
    "sums": "*fp32",
    "probs": "*fp32",
    "top_probs": "*fp32",
    "least": "*fp32",
    "masses": "*i64",
    "draws": "*fp64",
    "tokens": "*i64",
    "is_valid": "*u8",
    "bins": "*i32",
    "nums": "*i32",
    "candidates": "*fp32",
    "min_ps": "*fp32",
    "top_ks": "*i32",
    "top_ps": "*fp64",
    "counts": "*i32",
    "logprobs": "*fp32",
    "ranks": "*i32",
    "row_tops": "*fp32",
    "log_totals": "*fp32",
    "rows": "*i64",
    "biases": "*fp32",
    "is_seen": "*u8",
    "repetitions": "*fp32",
    "presences": "*fp32",
    "frequencies": "*fp32",
    "seeds": "*i64",
    "choices": "*i64",
    "positions": "*i64",
}
# Each kernel, and its arguments besides pointers.
_KERNELS: tuple[tuple[Any, dict[str, bool]], ...] = (
    (kernel.block_tops, {}),
    (kernel.block_weights, {}),
    (kernel.block_probabilities, {}),
    (kernel.block_masses, {"HAS_CUT": True}),
    (kernel.block_masses, {"HAS_CUT": False}),
    (kernel.draw_tokens, {"HAS_CUT": True, "HAS_LOGITS": True}),
    (kernel.draw_tokens, {"HAS_CUT": False, "HAS_LOGITS": True}),
    (cut_kernel.count_probabilities, {}),
    (cut_kernel.gather_candidates, {}),
    (logits_kernel.block_logprobs, {}),
)
# One program per row, which sees blocks but not their size.
_ROW_KERNELS = (kernel.pick_tops, cut_kernel.find_cuts, logits_kernel.join_logprobs)


def _case(name: str, function: Any, vocab_size: int, flags: dict[str, bool]) -> CompileCase:
    config = sampling_config(vocab_size)
    arguments: list[str] = function.arg_names
    sizes = {
        "VOCAB": vocab_size,
        "NUM_BLOCKS": config.num_blocks,
        "BLOCK": config.block,
        "BLOCK_N": config.block_blocks,
        "CAPACITY": config.capacity,
    }
    function_name: str = function.__name__
    absent = () if flags.get("HAS_CUT", True) else ("least_ptr",)
    return CompileCase(
        name=f"sampling/{function_name}-{name}" + ("-uncut" if absent else ""),
        kernel=function,
        signature={
            argument: _TYPES[argument.removesuffix("_ptr")]
            for argument in arguments
            if argument.endswith("_ptr") and argument not in absent
        },
        constexprs={
            **dict.fromkeys(absent),
            **{size: value for size, value in sizes.items() if size in arguments},
            **flags,
        },
        num_warps=_num_warps(function_name, config),
        num_stages=1,
    )


def _num_warps(function_name: str, config: SamplingConfig) -> int:
    if function_name in ("pick_tops", "join_logprobs"):
        return 1
    return config.search_warps if function_name == "find_cuts" else config.num_warps


def _listing_case(function: Any, num_name: str, block: int, num_warps: int) -> CompileCase:
    """Returns the case of a kernel over a list, which has no blocks of the vocabulary."""
    pointers = [a for a in function.arg_names if a.endswith("_ptr")]
    vocabulary = {"VOCAB": _VOCABULARIES["qwen3"]} if "VOCAB" in function.arg_names else {}
    return CompileCase(
        name=f"sampling/{function.__name__}",
        kernel=function,
        signature={a: _TYPES[a.removesuffix("_ptr")] for a in pointers} | {num_name: "i32"},
        constexprs={**vocabulary, "BLOCK": block},
        num_warps=num_warps,
        num_stages=1,
    )


CASES = (
    *(
        _case(name, function, vocab_size, flags)
        for name, vocab_size in _VOCABULARIES.items()
        for function, flags in _KERNELS
    ),
    *(_case("qwen3", function, _VOCABULARIES["qwen3"], {}) for function in _ROW_KERNELS),
    _listing_case(logits_kernel.adjust_logits, "num_entries", 256, 4),
    _listing_case(logits_kernel.draw_uniform, "num_rows", 32, 1),
)
