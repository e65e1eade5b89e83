"""Predicts the measured steps with `moe-serve calibrate`.

Its file is the one that `plan` and `cluster.calibration` read. It comes from other loads and other
code than these steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_serve.pipeline.costs.cost_model import StageCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks
from moe_serve.pipeline.costs.step_seconds import step_seconds
from moe_serve.planning.calibration import CalibrationRequest, calibrate

from .ablation import Ablation


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The predicted seconds of the layers of one batch, cut into micro-batches, without delays."""

    num_micro_batches: int
    expected_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.measured_s / self.expected_s - 1


def expected_steps(
    model: Path, found: Ablation, context: int, is_quick: bool
) -> tuple[Expected, ...]:
    """Calibrates in this process, with one thread as the ranks have."""
    request = CalibrationRequest(folder=model, num_threads=1, is_quick=is_quick, layouts=())
    return tuple(_expected(calibrate(request, lambda *_: None).costs, found, context))


def _expected(costs: StageCosts, found: Ablation, context: int) -> Iterator[Expected]:
    ranks, load = Ranks(num_attention=1, num_experts=1), BatchLoad.decode(found.batch, context)
    for point in found.cut:
        if not point.delay_s:
            parts = [(part,) for part in load.split(point.num_micro_batches)]
            yield Expected(
                num_micro_batches=point.num_micro_batches,
                expected_s=step_seconds(costs.layer_times(parts, ranks)),
                measured_s=point.step_s,
            )
