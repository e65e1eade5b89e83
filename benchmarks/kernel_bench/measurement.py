"""The results: one row of the table per piece of work, one entry per implementation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_bench.clock import Timing
from kernel_bench.limits import Bound, DeviceLimits


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
