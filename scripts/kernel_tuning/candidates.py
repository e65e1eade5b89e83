"""Lists the tiles of a grouped product that are worth trying on a chip (pure functions).

Settings that determine a row's bits (`block_c`, and `block_m`, which the batch may choose) stay as
the heuristics have them. The search varies outputs of a tile, warps, stages, the order of tiles,
and TMA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from moe_kernels.gpu.grouped_gemm.heuristics import (
    FP8_BLOCK,
    ProductShape,
    TileConfig,
    choose_tile,
)

_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_MAX_SUMS = 160  # of a thread, in registers of 32 bits: 255, less what addresses take
_SEARCHED = {
    "block_n": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "group_m": (1, 8),
    "uses_tma": (False, True),
}


def candidates(shape: ProductShape, block_m: int, capability: int) -> Iterator[TileConfig]:
    """List the configurations that fit the chip, the heuristics' own choice first."""
    chosen = choose_tile(block_m, shape, capability)
    yield chosen
    for values in product(*_SEARCHED.values()):
        searched: dict[str, Any] = dict(zip(_SEARCHED, values, strict=True))
        tile = replace(chosen, **searched)
        if tile != chosen and fits(tile, shape, capability):
            yield tile


def fits(tile: TileConfig, shape: ProductShape, capability: int) -> bool:
    """Check that sums fit the registers, stages the shared memory, and TMA the weights."""
    if tile.uses_tma and not (shape.can_use_tma and capability >= 90 and tile.block_m >= 64):
        return False
    if shape.weight_format == "fp8_block" and FP8_BLOCK % tile.block_n:
        return False
    num_parts = 2 if shape.is_gated else 1
    sums = num_parts * tile.block_m * tile.block_n // (32 * tile.num_warps)
    rows = num_parts * tile.block_n + tile.block_m
    shared = tile.num_stages * rows * tile.block_c * shape.item_bytes
    return sums <= _MAX_SUMS and shared <= _SHARED_BYTES[capability]


def overrides(tile: TileConfig, chosen: TileConfig) -> dict[str, int]:
    """Return the entry of a table: the fields that differ from the heuristics' choice."""
    fields, usual = asdict(tile), asdict(chosen)
    return {name: int(value) for name, value in fields.items() if value != usual[name]}
