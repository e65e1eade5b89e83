"""The default solver: a packing, improved in all layers and scenarios at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from experts.placement.bound import lower_bound
from experts.placement.copies import copies_in_slots
from experts.placement.judged import judged
from experts.placement.problem import PlacementProblem
from experts.placement.search.improve import Effort, improve
from experts.placement.search.relabel import relabelled
from experts.placement.search.start import first_state
from experts.placement.search.watch import Watch
from experts.placement.solution import Progress, Solution


class Search:
    """The same plan for the same problem and seed, unless it was ended early.

    It ends as soon as the plan is good; `thorough` goes on until hardly anything is found, which is
    for callers with a deadline.
    """

    name = "search"

    def __init__(
        self, *, seed: int = 0, thorough: bool = False, effort: Effort | None = None
    ) -> None:
        """`effort`: in place of the usual or the thorough one."""
        self._seed, self._thorough, self._effort = seed, thorough, effort

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """See `Solver`; Ctrl-C ends it with the best so far, as a deadline does."""
        bound = lower_bound(problem)
        watch = Watch(bound.value, seconds, report)
        state = first_state(problem)
        try:
            kind = Effort.thorough if self._thorough else Effort.usual
            num_copies = int(state.rules.open_NDC.sum())
            effort = self._effort or kind(len(bound.by_SL), num_copies, len(problem.devices))
            improve(state, bound.by_SL.mean(axis=0), effort, self._seed, watch)
        except KeyboardInterrupt:
            watch.end()
        slot_LDC = np.where(state.slot_NDC == state.num_experts, -1, state.slot_NDC)
        copies_LED = copies_in_slots(slot_LDC, problem.loads.num_experts)
        return judged(
            problem,
            relabelled(problem, copies_LED),
            solver=self.name,
            seconds=watch.elapsed,
            is_complete=not watch.is_over,
            bound=bound,
        )
