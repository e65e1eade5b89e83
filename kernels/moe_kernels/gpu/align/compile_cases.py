"""The alignment as it ships for known numbers of experts, in tiles of every size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moe_kernels.gpu.align.api import MAP_TILES, SCAN_CHUNKS, SCAN_EXPERTS
from moe_kernels.gpu.align.heuristics import AlignConfig, choose_align
from moe_kernels.gpu.align.kernel import (
    align_kernel,
    count_kernel,
    map_kernel,
    place_kernel,
    scan_kernel,
)
from moe_kernels.gpu.compile_case import CompileCase
from moe_kernels.gpu.grouped_gemm.heuristics import BLOCK_MS

# Mixtral (and one expert, as a shared one is); DeepSeek-V3's ranks of 8; OLMoE; Qwen3 and GPT-OSS.
_NUM_EXPERTS = (8, 32, 64, 128)
_FEW_SLOTS, _CHUNKED_SLOTS = 1024, 131072
_SIZES = {"num_slots": "i32", "num_experts": "i32"}
_PLACES = ("sorted_slots_ptr", "tile_experts_ptr")
_NUMBERS = ("tile_starts_ptr", "num_tiles_ptr")


def _cases() -> Iterator[CompileCase]:
    for num_experts, block_rows in product(_NUM_EXPERTS, BLOCK_MS):
        config = choose_align(_FEW_SLOTS, num_experts, block_rows)
        bins, block_slots = config.block_experts, config.block_slots
        yield _case(
            f"one-{bins}-{block_rows}",
            align_kernel,
            {
                "ids_ptr": "*i64",
                **dict.fromkeys((*_PLACES, "counts_ptr", *_NUMBERS), "*i32"),
                **_SIZES,
                "max_tiles": "i32",
            },
            {"BLOCK_ROWS": block_rows, "BLOCK_SLOTS": block_slots, "BLOCK_EXPERTS": bins},
        )
    for num_experts in _NUM_EXPERTS:
        yield from _chunk_cases(choose_align(_CHUNKED_SLOTS, num_experts, BLOCK_MS[-1]))
    yield _case(
        "scan",
        scan_kernel,
        {
            **dict.fromkeys(("chunk_counts_ptr", "counts_ptr"), "*i32"),
            **dict.fromkeys(("num_chunks", "num_experts"), "i32"),
        },
        {"BLOCK_CHUNKS": SCAN_CHUNKS, "BLOCK_EXPERTS": SCAN_EXPERTS},
    )
    for rows in BLOCK_MS:
        yield _case(
            f"place-{rows}",
            place_kernel,
            {
                "ids_ptr": "*i64",
                **dict.fromkeys(
                    ("chunk_starts_ptr", "tile_starts_ptr", "sorted_slots_ptr"), "*i32"
                ),
                **_SIZES,
            },
            {"CHUNK": choose_align(_CHUNKED_SLOTS, 8, rows).chunk, "BLOCK_ROWS": rows},
        )


def _chunk_cases(config: AlignConfig) -> Iterator[CompileCase]:
    """Returns the constants that depend on the number of experts when there are many slots."""
    bins = config.block_experts
    yield _case(
        f"count-{bins}",
        count_kernel,
        {"ids_ptr": "*i64", "chunk_counts_ptr": "*i32", **_SIZES},
        {"CHUNK": config.chunk, "BLOCK_EXPERTS": bins},
    )
    for rows in BLOCK_MS:
        yield _case(
            f"map-{bins}-{rows}",
            map_kernel,
            {
                **dict.fromkeys(("counts_ptr", *_PLACES, *_NUMBERS), "*i32"),
                **_SIZES,
                "max_tiles": "i32",
            },
            {"BLOCK_ROWS": rows, "BLOCK_TILES": MAP_TILES, "BLOCK_EXPERTS": bins},
        )


def _case(
    name: str, kernel: object, signature: dict[str, str], constexprs: dict[str, object]
) -> CompileCase:
    return CompileCase(
        name=f"align/{name}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=4,
        num_stages=3,
    )


CASES: tuple[CompileCase, ...] = tuple(_cases())
