"""The interface of cost models: what a step costs on given ranks.

The choice of micro-batches, the planner of layouts and simulations read costs through `StepCosts`.
`StageCosts` implements it from a calibration, `OnlineCosts` from the running steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_serve.pipeline.costs.batch_load import BatchLoad
from moe_serve.pipeline.costs.step_seconds import LayerTimes, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The numbers of attention ranks and expert ranks in a layout.

    `imbalance`: the busiest expert rank's share divided by the mean share; `is_router_on_experts`:
    the expert ranks choose experts, so rows go to all of them.
    """

    num_attention: int
    num_experts: int
    imbalance: float = 1.0
    is_router_on_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Durations of a step, as its ranks and the coordinator measured them; each a difference of one
    clock.

    With several ranks, the values of the one that computed longest.
    """

    seconds: float  # the whole step
    attention_s: float  # in the attention stages of all layers and micro-batches
    experts_s: float  # in the expert stages of all layers and micro-batches
    wait_s: float  # time an attention rank waited for the experts' sums


class StepCosts(Protocol):
    """Predicts the seconds of steps of one model on one kind of machine."""

    @property
    def is_ready(self) -> bool:
        """Whether predictions can be made already."""
        ...

    @property
    def version(self) -> int:
        """A number that grows when predictions may have changed by more than a few percent."""
        ...

    def layer_times(
        self, micro_batches: Sequence[Sequence[BatchLoad]], ranks: Ranks
    ) -> tuple[LayerTimes, ...]:
        """Predict the times of all layers. `micro_batches[j]` holds every attention rank's load in
        micro-batch j."""
        ...

    def fixed_seconds(self, loads: Sequence[BatchLoad]) -> float:
        """Predict the seconds of a step outside its layers. `loads[a]` is the load of attention
        rank a."""
        ...

    def colocated_time(self, load: BatchLoad) -> float:
        """Predict the seconds of a step on one device that has everything: no transfers and no
        overlap."""
        ...

    def observe(self, loads: Sequence[BatchLoad], num_parts: int, timing: StepTiming) -> None:
        """Learn from a step that ran with `num_parts` micro-batches."""
        ...


def step_time(
    costs: StepCosts, loads: Sequence[BatchLoad], num_micro_batches: int, ranks: Ranks
) -> float:
    """Predict the seconds of a step; `loads[a]` is the load of attention rank a."""
    parts = list(zip(*(load.split(num_micro_batches) for load in loads), strict=True))
    return step_seconds(costs.layer_times(parts, ranks)) + costs.fixed_seconds(loads)
