"""A product's tile: what the heuristics choose, and on top what was tuned for this device. Pure."""

from __future__ import annotations

from dataclasses import asdict

from moe_kernels.gpu.grouped_gemm.heuristics import ProductShape, TileConfig, choose_tile
from moe_kernels.gpu.tuned import TunedTable

_FIXED = ("block_m", "block_c")  # what decides a row's bits is not for a table to say


def tuned_tile(block_m: int, shape: ProductShape, capability: int, table: TunedTable) -> TileConfig:
    """choose_tile, with the fields that the table's entry for these weights overrides."""
    chosen = choose_tile(block_m, shape, capability)
    entry = table.of(tuning_key(shape, block_m))
    if not entry:
        return chosen
    unknown = [name for name in entry if name in _FIXED or name not in asdict(chosen)]
    assert not unknown, f"the table of {table.device} sets {unknown}, which is not tuned"
    fields = {name: type(value)(entry.get(name, value)) for name, value in asdict(chosen).items()}
    return TileConfig(**fields)


def tuning_key(shape: ProductShape, block_m: int) -> str:
    """Shapes of weights, and the size of a tile: "grouped_gemm/gated 768x2048 plain 2 m16"."""
    kind = "gated" if shape.is_gated else "down"
    weights = f"{shape.num_outputs}x{shape.num_inputs} {shape.weight_format}"
    group = f" of {shape.group}" if shape.group else ""
    return f"grouped_gemm/{kind} {weights}{group} {shape.item_bytes} m{block_m}"
