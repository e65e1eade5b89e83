"""The published EPLB as a solver, for `compare`. It plans for the mean of all scenarios, as engines
do.

It ignores pins, speeds and budgets of moves, and may put an expert twice on a device;
`Solution.copies_LED` then has the copies that its placement cannot express.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from experts.placement.errors import PlacementError
from experts.placement.judge.copies import copies_in_slots
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, judged
from experts.placement.solvers.references.eplb import eplb_slots


class Eplb:
    """The solver `eplb` (global), or `eplb-hierarchical` with the groups of the model's router."""

    def __init__(self, num_groups: int | None = None, *, hierarchical: bool = False) -> None:
        """`num_groups` defaults to that of the problem's grouping."""
        self.name = "eplb-hierarchical" if hierarchical else "eplb"
        self._hierarchical = hierarchical
        self._num_groups = num_groups

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """Solve at once; the reported time is that of the algorithm alone."""
        slots_LD = problem.slots_by_layer()
        if (slots_LD != slots_LD[0, 0]).any():
            raise PlacementError(
                f"EPLB needs equal slots on all devices; they have {slots_LD.min()} to "
                f"{slots_LD.max()}."
            )
        start = time.perf_counter()
        load_LE = problem.loads.shares_SLE().mean(axis=0)
        num_groups, num_nodes = self._groups(problem)
        slots_LP = eplb_slots(
            load_LE,
            num_slots=int(slots_LD[0].sum()),
            num_groups=num_groups,
            num_nodes=num_nodes,
            num_devices=len(problem.devices),
        )
        seconds_used = time.perf_counter() - start
        slots_LDC = slots_LP.reshape(*slots_LD.shape, -1)
        copies_LED = copies_in_slots(slots_LDC, problem.loads.num_experts)
        return judged(problem, copies_LED, solver=self.name, seconds=seconds_used)

    def _groups(self, problem: PlacementProblem) -> tuple[int, int]:
        if not self._hierarchical:
            return 1, 1
        num_groups = self._num_groups
        if num_groups is None and problem.grouping is not None:
            num_groups = problem.grouping.num_groups
        if num_groups is None:
            raise PlacementError(
                "Hierarchical EPLB needs the number of groups of the router: give --groups."
            )
        return num_groups, problem.devices.num_nodes
