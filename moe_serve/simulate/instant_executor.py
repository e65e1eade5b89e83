"""Executes the steps of a simulated device: tokens at once, and the seconds that they cost."""

from __future__ import annotations

from collections.abc import Mapping

from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.step_costs import BatchLoad, StepCosts
from moe_serve.simulate.virtual_clock import VirtualClock, answers


class InstantExecutor:
    """Implements StepExecutor for a device that has the whole model. A step moves the clock on by
    what `costs` predict for it."""

    def __init__(self, clock: VirtualClock, costs: StepCosts) -> None:
        self._clock, self._costs = clock, costs

    @property
    def expert_memory(self) -> None:
        """None, as all experts are in memory."""

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        """See `StepExecutor.run`."""
        seconds = self._costs.colocated_time(BatchLoad.of(plan.slices))
        self._clock.advance_to(self._clock.now + seconds)
        return StepOutcome(sampled=answers((s.sequence_id, s.num_logits) for s in plan.slices))

    def forget(self, sequence_ids: list[int]) -> None:
        """Does nothing, as no state is kept between steps."""

    def clear_pages(self, pages: list[int]) -> None:
        """Does nothing, as pages have no content."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Does nothing, as pages have no content."""

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [True] * len(pages)
