"""Searches the fastest tiles of the grouped products on this GPU, and keeps those that are faster
than the heuristics' choice.

    python scripts/tune_kernels.py                        search and print
    python scripts/tune_kernels.py --write                also write kernels/moe_kernels/gpu/tuned/
    python scripts/tune_kernels.py --layers olmoe --dry-run --capability 90

`--dry-run` lists the tiles to try, and needs no GPU. A table is for one device and one version of
triton. With `--write` it is written after each product, and a later run continues after the last
one (`--again` starts anew). A product whose fastest tiles are the heuristics' choice has an empty
entry.

Settings that determine a row's bits (`block_c`, and `block_m`, which the batch may choose) stay as
the heuristics have them. The search varies outputs of a tile, warps, stages, the order of tiles,
and TMA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from moe_kernels.gpu.compile_case import TARGETS
from moe_kernels.gpu.expert_layers import EXPERT_LAYERS, ExpertLayerSizes
from moe_kernels.gpu.grouped_gemm import pack
from moe_kernels.gpu.grouped_gemm.api import Chip, chip_of, grouped_experts
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.heuristics import (
    BLOCK_MS,
    FP8_BLOCK,
    ProductShape,
    TileConfig,
    choose_tile,
)
from moe_kernels.gpu.tuned import TunedTable, load_tuned, minor_version, tuning_key

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
    """Checks that sums fit the registers, stages the shared memory, and TMA the weights."""
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
    """Returns the entry of a table: the fields that differ from the heuristics' choice."""
    fields, usual = asdict(tile), asdict(chosen)
    return {name: int(value) for name, value in fields.items() if value != usual[name]}


Say = Callable[[str], None]
Entries = dict[str, dict[str, int]]
# (layer, block_m, entries) -> seconds, or None where these tiles do not compile or do not launch
Measure = Callable[[ExpertLayerSizes, int, Mapping[str, Mapping[str, int]]], float | None]
Keep = Callable[[str, dict[str, int]], None]  # (key, what beats the heuristics, if anything)
LEAST_GAIN = 1.02  # a smaller one is noise
_SHARE = 0.75  # of a tile that an average expert's rows fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One of a layer's two products with one tile size."""

    shape: ProductShape
    block_m: int

    @property
    def key(self) -> str:
        return tuning_key(self.shape, self.block_m)


def products(layer: ExpertLayerSizes) -> list[Product]:
    """Yields both products with every tile size."""
    width, expert_width = layer.width, layer.expert_width
    shapes = (
        ProductShape(num_inputs=width, num_outputs=expert_width, is_gated=True),
        ProductShape(num_inputs=expert_width, num_outputs=width, is_gated=False),
    )
    return [Product(shape=shape, block_m=block_m) for block_m in BLOCK_MS for shape in shapes]


def tune_layer(
    layer: ExpertLayerSizes,
    capability: int,
    measure: Measure,
    say: Say,
    *,
    known: Mapping[str, Mapping[str, int]] | None = None,
    keep: Keep = lambda key, entry: None,
) -> Entries:
    """Finds configurations faster than the heuristics', one product after the other.

    Products of `known` were tuned before. `keep` gets each as soon as it is tuned.
    """
    entries: Entries = {key: dict(entry) for key, entry in (known or {}).items()}
    for item in products(layer):
        if item.key in entries:
            say(f"{layer.name} {item.key}: tuned before")
            continue
        chosen = choose_tile(item.block_m, item.shape, capability)
        usual = measure(layer, item.block_m, entries)
        assert usual is not None, f"{layer.name}: the heuristics' own tiles do not run"
        best, fastest = chosen, usual
        for tile in candidates(item.shape, item.block_m, capability):
            seconds = measure(layer, item.block_m, entries | {item.key: overrides(tile, chosen)})
            if seconds is not None and seconds < fastest:
                best, fastest = tile, seconds
        entry = overrides(best, chosen) if usual > LEAST_GAIN * fastest else {}
        if entry:
            entries[item.key] = entry
        keep(item.key, entry)
        say(f"{layer.name} {item.key}: {usual * 1e6:.1f} -> {fastest * 1e6:.1f} us {_told(best)}")
    return entries


def _told(tile: TileConfig) -> str:
    kind = "TMA" if tile.uses_tma else "plain"
    return f"{tile.block_n} outputs, {tile.num_warps} warps, {tile.num_stages} stages, {kind}"


class DeviceMeasure:
    """Measures both products of a layer on the current CUDA device, in bf16, as the median of many
    runs."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._layer: ExpertLayerSizes | None = None
        self._experts: GroupedExperts | None = None

    def __call__(
        self, layer: ExpertLayerSizes, block_m: int, entries: Mapping[str, Mapping[str, int]]
    ) -> float | None:
        chip = replace(self._chip, tuned=TunedTable(entries=entries))
        experts, rows = self._experts_of(layer), _rows(layer, block_m)
        try:
            milliseconds: Any = triton.testing.do_bench(
                lambda: grouped_experts(*rows, experts, chip, block_m), return_mode="median"
            )
        except (RuntimeError, TritonError):
            return None
        return float(milliseconds) / 1e3

    def _experts_of(self, layer: ExpertLayerSizes) -> GroupedExperts:
        """Creates the tensors of a layer once, because it is measured hundreds of times."""
        if self._layer != layer or self._experts is None:
            self._experts = None  # frees the last layer's
            count, d, f = layer.num_local_experts, layer.width, layer.expert_width
            self._experts = GroupedExperts(
                gate_up=pack.plain(_random(count, 2 * f, d), 2),
                down=pack.plain(_random(count, d, f), 1),
                activation=layer.activation,
                gate_up_bias=_random(count, 2 * f) if layer.has_bias else None,
                down_bias=_random(count, d) if layer.has_bias else None,
            )
            self._layer = layer
        return self._experts


def _rows(layer: ExpertLayerSizes, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, ids and weights with which tiles of `block_m` slots are mostly full."""
    num_slots = _SHARE * block_m * layer.num_local_experts
    num_rows = max(1, int(num_slots) // layer.num_choices)
    scores = torch.rand(num_rows, layer.num_local_experts, device="cuda")
    weights, ids = scores.topk(layer.num_choices)
    return _random(num_rows, layer.width), ids.sort(-1).values, weights


def _random(*size: int) -> Tensor:
    values = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    return values.normal_(std=0.02)


def main() -> int:
    arguments = parse_arguments()
    layers = [layer for layer in EXPERT_LAYERS if layer.name in arguments.layers]
    if arguments.dry_run:
        list_candidates(layers, arguments.capability)
        return 0
    if not torch.cuda.is_available():
        print("there is no CUDA device to tune for; --dry-run lists candidates", file=sys.stderr)
        return 1
    chip = chip_of(torch.device("cuda"), has_equal_tiles=True)
    device = torch.cuda.get_device_name()
    before = load_tuned(device, triton.__version__).entries
    known: Entries = {} if arguments.again else {key: dict(e) for key, e in before.items()}

    def keep(key: str, entry: dict[str, int]) -> None:
        known[key] = entry
        if arguments.write:
            merged(device, {key: entry}).write()

    for layer in layers:
        tune_layer(layer, chip.capability, DeviceMeasure(chip), say, known=known, keep=keep)
    say(f"{sum(map(bool, known.values()))} tiles beat the heuristics")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tune the grouped products for this GPU.")
    names = [layer.name for layer in EXPERT_LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names)
    parser.add_argument("--write", action="store_true", help="keep the table for this device")
    parser.add_argument("--again", action="store_true", help="tune finished products again")
    parser.add_argument("--dry-run", action="store_true", help="list configurations, run none")
    parser.add_argument("--capability", type=int, choices=TARGETS, default=90, help="for --dry-run")
    return parser.parse_args()


def merged(device: str, entries: Entries) -> TunedTable:
    """Merges earlier and new results; only the requested layers are new."""
    before = load_tuned(device, triton.__version__)
    return TunedTable(
        device=device,
        triton=minor_version(triton.__version__),
        entries={**before.entries, **entries},
    )


def list_candidates(layers: Sequence[ExpertLayerSizes], capability: int) -> None:
    total = 0
    for layer in layers:
        for item in products(layer):
            count = len(list(candidates(item.shape, item.block_m, capability)))
            print(f"{layer.name:24} {item.key:48} {count:4} tiles")
            total += count
    print(f"{total} tiles on sm_{capability}")


if __name__ == "__main__":
    sys.exit(main())
