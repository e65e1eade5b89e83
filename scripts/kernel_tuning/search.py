"""Finds the fastest tile of each product of a layer on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from kernel_tuning.candidates import candidates, overrides
from moe_kernels.gpu.expert_layers import ExpertLayerSizes
from moe_kernels.gpu.grouped_gemm import pack
from moe_kernels.gpu.grouped_gemm.api import Chip, grouped_experts
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.heuristics import BLOCK_MS, ProductShape, TileConfig, choose_tile
from moe_kernels.gpu.tuned import TunedTable, tuning_key

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
    """Find configurations faster than the heuristics', one product after the other.

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
