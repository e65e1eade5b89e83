"""Products with signs at the widths of the model families, for compilation ahead of time."""

from __future__ import annotations

from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.signs.heuristics import BLOCK_M, sign_tile
from moe_kernels.gpu.signs.kernel import signed_product_kernel

_SIZES = ("num_inputs", "num_outputs", "num_bytes")
# Names, inputs and outputs of Qwen3-30B-A3B and GPT-OSS: attention, gate and up, down.
_LINEARS = (("qwen3-30b-a3b-qkv", 2048, 5120), ("gpt-oss-output", 4096, 2880))
_EXPERTS = (
    ("qwen3-30b-a3b-gate-up", 2048, 768, 2),
    ("qwen3-30b-a3b-down", 768, 2048, 1),
    ("gpt-oss-gate-up", 2880, 2880, 2),
    ("gpt-oss-down", 2880, 2880, 1),
)


def _case(
    name: str, num_inputs: int, num_outputs: int, num_parts: int, has_base: bool
) -> CompileCase:
    tile = sign_tile(item_bytes=2)
    pointers: dict[str, str | None] = {
        "x_ptr": "*bf16",
        "rows_ptr": "*i64",
        "table_ptr": "*i64",
        "base_ptr": "*bf16" if has_base else None,
        "out_ptr": "*bf16" if has_base else "*fp32",
        **dict.fromkeys(("tile_matrices_ptr", "sorted_slots_ptr", "num_tiles_ptr"), "*i32"),
    }
    sizes = dict(zip(_SIZES, (num_inputs, num_outputs, num_inputs // 8), strict=True))
    return CompileCase(
        name=f"signs/{name}",
        kernel=signed_product_kernel,
        signature={
            **{key: kind for key, kind in pointers.items() if kind},
            **dict.fromkeys(("num_slots", "num_matrices", *_SIZES), "i32"),
        },
        constexprs={
            **{key: None for key, kind in pointers.items() if not kind},
            "PARTS": num_parts,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": tile.block_n,
            "BLOCK_C": tile.block_c,
            "GROUP_M": tile.group_m,
            "IS_EVEN": num_inputs % tile.block_c == 0,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible_by_16=tuple(key for key, size in sizes.items() if size % 16 == 0),
        has_tensor_cores=True,
        expects_wgmma=True,
    )


CASES = (
    *(_case(*each, 1, has_base=True) for each in _LINEARS),
    *(_case(*each, has_base=False) for each in _EXPERTS),
)
