"""The configurations that `scripts/tune_kernels.py` found fastest: `tuned/<device>.json`.

    {"device": "NVIDIA H200", "triton": "3.7",
     "entries": {"grouped_gemm/gated 768x2048 plain m16": {"block_n": 64, "num_warps": 4}}}

A key names weight shapes and a tile of rows, never the batch, so that a table cannot change what a
row's result depends on; an entry overrides fields of the configuration that the heuristics chose.
Without a table for this device and this triton the heuristics stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moe_kernels.gpu.grouped_gemm.heuristics import ProductShape, TileConfig, choose_tile

FOLDER = Path(__file__).parent / "tuned"
_FIXED = ("block_m", "block_c")  # what decides a row's bits is not for a table to say


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """`triton` is the version up to the minor: another compiler makes other code of a tile."""

    device: str = ""
    triton: str = ""
    entries: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, key: str) -> Mapping[str, int]:
        """Returns the fields to override; empty where nothing was tuned."""
        return self.entries.get(key, {})

    def write(self, folder: Path = FOLDER) -> Path:
        """Writes the device's file, keys sorted."""
        folder.mkdir(exist_ok=True)
        path = folder / f"{slug(self.device)}.json"
        content = {"device": self.device, "triton": self.triton, "entries": dict(self.entries)}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
        return path


def load_tuned(device: str, triton_version: str, folder: Path = FOLDER) -> TunedTable:
    """Loads the table for this device and version of triton; empty if no file exists."""
    path = folder / f"{slug(device)}.json"
    triton = minor_version(triton_version)
    if not path.is_file():
        return TunedTable(device=device, triton=triton)
    table = TunedTable(**json.loads(path.read_text("utf-8")))
    return table if table.triton == triton else TunedTable(device=device, triton=triton)


def slug(device: str) -> str:
    """Returns a device's name as a file's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def minor_version(version: str) -> str:
    """ "3.7.1" -> "3.7"."""
    return ".".join(version.split(".")[:2])


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
