"""Executes the steps of a simulated device: tokens at once, and the seconds that they cost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Items

from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.step_costs import BatchLoad, StepCosts
from moe_serve.simulate.virtual_clock import VirtualClock, answers


class InstantExecutor:
    """Implements StepExecutor for a device that has the whole model. A step moves the clock on by
    what `costs` predict for it, times a ratio drawn from `scatter` (evenly spaced quantiles; empty:
    1). The same ratios are drawn each time."""

    def __init__(self, clock: VirtualClock, costs: StepCosts, scatter: Items[float] = ()) -> None:
        self._clock, self._costs, self._scatter = clock, costs, scatter
        self._random = random.Random(0)

    @property
    def expert_memory(self) -> None:
        """None, as all experts are in memory."""

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        """See `StepExecutor.run`."""
        seconds = self._costs.colocated_time(BatchLoad.of(plan.slices)) * self._ratio()
        self._clock.advance_to(self._clock.now + seconds)
        return StepOutcome(sampled=answers((s.sequence_id, s.num_logits) for s in plan.slices))

    def _ratio(self) -> float:
        if not self._scatter:
            return 1.0
        place = self._random.random() * (len(self._scatter) - 1)
        low = int(place)
        a, b = self._scatter[low], self._scatter[min(low + 1, len(self._scatter) - 1)]
        return a + (place - low) * (b - a)

    def forget(self, sequence_ids: list[int]) -> None:
        """Does nothing, as no state is kept between steps."""

    def clear_pages(self, pages: list[int]) -> None:
        """Does nothing, as pages have no content."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Does nothing, as pages have no content."""

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [True] * len(pages)
