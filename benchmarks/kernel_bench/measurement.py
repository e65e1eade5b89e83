"""The results: one row of the table per piece of work, one entry per implementation, kept in the
device's folder `benchmarks/results/<device>/`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.environment import describe_environment
from kernel_bench.clock import Bound, DeviceLimits, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One timing. `error` is relative to the reference; None without a reference.

    `failure` is the reason why there is no timing.
    """

    contestant: str
    timing: Timing | None = None
    error: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """One shape at one size."""

    work: str  # "experts" or "attention"
    shape: str
    num_tokens: int
    bound: Bound
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything of one run."""

    device: str
    dtype: str
    environment: dict[str, str]
    limits: DeviceLimits
    results: tuple[WorkResult, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Returns |result - reference| / |reference|, with both as one long vector."""
    difference = torch.linalg.vector_norm(result.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()))


def last_line(error: Exception) -> str:
    """Returns the text of a failure in one line for the table."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[-1] if text else ''}"[:200]


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
