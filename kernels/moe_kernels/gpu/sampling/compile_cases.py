"""The vocabularies of the families, for compilation ahead of time."""

from __future__ import annotations

from typing import Any

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.sampling import cut_kernel, kernel, logits_kernel
from moe_kernels.gpu.sampling.heuristics import SamplingConfig, sampling_config

# The smallest, a usual and the largest: blocks of 512, 4096 and 4096 tokens.
_VOCABULARIES = {"mixtral": 32_000, "qwen3": 151_936, "gpt-oss": 201_088}
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
# Kernel, and what it takes besides pointers.
_KERNELS: tuple[tuple[Any, dict[str, bool]], ...] = (
    (kernel.block_tops, {}),
    (kernel.pick_tops, {}),
    (kernel.block_weights, {}),
    (kernel.block_probabilities, {}),
    (kernel.block_masses, {"HAS_CUT": True}),
    (kernel.draw_tokens, {"HAS_CUT": True, "HAS_LOGITS": True}),
    (cut_kernel.count_probabilities, {}),
    (cut_kernel.gather_candidates, {}),
    (cut_kernel.find_cuts, {}),
    (logits_kernel.block_logprobs, {}),
    (logits_kernel.join_logprobs, {}),
)


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
    return CompileCase(
        name=f"sampling/{function_name}-{name}",
        kernel=function,
        signature={
            f"{argument}_ptr": _TYPES[argument]
            for argument in (a.removesuffix("_ptr") for a in arguments if a.endswith("_ptr"))
        },
        constexprs={**{size: value for size, value in sizes.items() if size in arguments}, **flags},
        num_warps=_num_warps(function_name, config),
        num_stages=1,
    )


def _num_warps(function_name: str, config: SamplingConfig) -> int:
    if function_name in ("pick_tops", "join_logprobs"):
        return 1
    return config.search_warps if function_name == "find_cuts" else config.num_warps


def _entries_case(function: Any, num_name: str, block: int, num_warps: int) -> CompileCase:
    """A kernel over a list, whatever the vocabulary."""
    arguments: list[str] = function.arg_names
    pointers = [a for a in arguments if a.endswith("_ptr")]
    function_name: str = function.__name__
    constexprs = {"VOCAB": 151_936, "BLOCK": block}
    return CompileCase(
        name=f"sampling/{function_name}",
        kernel=function,
        signature={a: _TYPES[a.removesuffix("_ptr")] for a in pointers} | {num_name: "i32"},
        constexprs={name: value for name, value in constexprs.items() if name in arguments},
        num_warps=num_warps,
        num_stages=1,
    )


CASES = (
    *(
        _case(name, function, vocab_size, flags)
        for name, vocab_size in _VOCABULARIES.items()
        for function, flags in _KERNELS
    ),
    _entries_case(logits_kernel.adjust_logits, "num_entries", 256, 4),
    _entries_case(logits_kernel.draw_uniform, "num_rows", 32, 1),
)
