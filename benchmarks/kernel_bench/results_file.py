"""Reads and writes the results of a device: `benchmarks/results/<device>/`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from harness.environment import describe_environment
from kernel_bench.measurement import BenchReport

RESULTS = Path(__file__).resolve().parents[1] / "results"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return describe_environment()["cpu"]


def device_folder(device: torch.device) -> str:
    """Returns the name of a device as a folder name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def write_kernels(report: BenchReport, path: Path, *, keeps_others: bool) -> None:
    """Writes the results of a device.

    With `keeps_others`, results of an earlier run in the same dtype stay if they are for other
    shapes or tokens.
    """
    content = report.to_json()
    if keeps_others and path.exists():
        earlier: dict[str, Any] = json.loads(path.read_text("utf-8"))
        mine = {_key(row) for row in content["results"]}
        if earlier["dtype"] == report.dtype:
            others = [row for row in earlier["results"] if _key(row) not in mine]
            content["results"] = [*others, *content["results"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    return row["work"], row["shape"], row["num_tokens"]
