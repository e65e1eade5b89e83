"""Tables of what `scripts/tune_kernels.py` found fastest on a device: `tuned/<device>.json`.

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
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """`triton` is the version up to the minor: another compiler makes other code of a tile."""

    device: str = ""
    triton: str = ""
    entries: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, key: str) -> Mapping[str, int]:
        """The fields to override; empty where nothing was tuned."""
        return self.entries.get(key, {})

    def write(self, folder: Path = FOLDER) -> Path:
        """Into the device's file, keys sorted."""
        folder.mkdir(exist_ok=True)
        path = folder / f"{slug(self.device)}.json"
        content = {"device": self.device, "triton": self.triton, "entries": dict(self.entries)}
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "utf-8")
        return path


def load_tuned(device: str, triton_version: str, folder: Path = FOLDER) -> TunedTable:
    """Load the table for this device and version of triton; empty if no file exists."""
    path = folder / f"{slug(device)}.json"
    triton = minor_version(triton_version)
    if not path.is_file():
        return TunedTable(device=device, triton=triton)
    table = TunedTable(**json.loads(path.read_text("utf-8")))
    return table if table.triton == triton else TunedTable(device=device, triton=triton)


def slug(device: str) -> str:
    """A device's name as a file's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def minor_version(version: str) -> str:
    """ "3.7.1" -> "3.7"."""
    return ".".join(version.split(".")[:2])
