"""Executes the steps of a simulated device: returns tokens at once, and adds their seconds to the
clock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items

from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.sequence import Sequence
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.step_costs import BatchLoad, StepCosts
from moe_serve.simulate.virtual_clock import VirtualClock, answers


class Scatter:
    """Draws ratios of measured to predicted times, the same ones each time. `quantiles`: evenly
    spaced; empty: all ratios are 1."""

    def __init__(self, quantiles: Items[float] = ()) -> None:
        self._quantiles, self._random = quantiles, random.Random(0)

    def draw(self) -> float:
        """Returns the next ratio."""
        if not self._quantiles:
            return 1.0
        place = self._random.random() * (len(self._quantiles) - 1)
        low = int(place)
        a, b = self._quantiles[low], self._quantiles[min(low + 1, len(self._quantiles) - 1)]
        return a + (place - low) * (b - a)


class InstantExecutor:
    """Implements StepExecutor for a device that has the whole model. A step moves the clock on by
    what `costs` predict for it, times a ratio drawn from `scatter` (see `Scatter`)."""

    def __init__(self, clock: VirtualClock, costs: StepCosts, scatter: Items[float] = ()) -> None:
        self._clock, self._costs, self._scatter = clock, costs, Scatter(scatter)
        self._ahead: deque[float] = deque()  # ratios of steps that were foreseen
        self._ends: Items[float] = ()  # of the steps that the next call is to run at once

    def ends_of(self, num_tokens: int, num_sequences: int, num_steps: int) -> list[float]:
        """Predicts when the next steps end, if each gives one token to the same sequences, whose
        contexts have `num_tokens` in the first of them.
        """
        while len(self._ahead) < num_steps:
            self._ahead.append(self._scatter.draw())
        at_s, ends = self._clock.now, []
        for step in range(num_steps):
            num_kv = num_tokens + step * num_sequences
            load = BatchLoad(
                num_rows=num_sequences,
                num_sequences=num_sequences,
                num_kv_tokens=num_kv,
                num_pairs=num_kv,
                num_largest=1,
            )
            at_s += self._costs.colocated_time(load) * self._ahead[step]
            ends.append(at_s)
        return ends

    def repeat(self, ends: Items[float]) -> None:
        """Lets the next call of `run` run as many steps at once, which end at these times."""
        self._ends = ends

    @property
    def has_page_work(self) -> bool:
        return False  # there are no pages

    def finish_page_work(self) -> None:
        """Does nothing."""

    @property
    def expert_memory(self) -> None:
        """None, as all experts are in memory."""

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        """See `StepExecutor.run`."""
        ends, self._ends = self._ends, ()
        if ends:
            assert all(len(s.token_ids) == 1 for s in plan.slices), "only decode steps are repeated"
            self._clock.advance_to(ends[-1])
            for _ in ends:
                self._ahead.popleft()
        else:
            ratio = self._ahead.popleft() if self._ahead else self._scatter.draw()
            seconds = self._costs.colocated_time(BatchLoad.of(plan.slices)) * ratio
            self._clock.advance_to(self._clock.now + seconds)
        pairs = ((s.sequence_id, s.num_logits) for s in plan.slices)
        return StepOutcome(sampled=answers(pairs, max(1, len(ends))))

    def forget(self, sequence_ids: list[int]) -> None:
        """Does nothing, as no state is kept between steps."""

    def clear_pages(self, pages: list[int]) -> None:
        """Does nothing, as pages have no content."""

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Does nothing, as pages have no content."""

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [True] * len(pages)
