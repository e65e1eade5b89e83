"""A plan with what was proved about it, and the interface of what makes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.plan import Placement
from experts.placement.problem.problem import PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """`objective` and `bound` are mean over layers of the mean over scenarios of the largest load
    over the mean load of a device (of its speed): 1 is perfect, balancedness is near 1 / objective.

    With `activated` the mean is that of one copy of each expert: more copies activate more.
    """

    placement: Placement
    objective: float
    bound: float  # no plan of this problem has a smaller objective
    bound_proof: str  # why, in one line
    solver: str
    seconds: float
    is_complete: bool  # False: a deadline or Ctrl-C ended it; the plan is valid all the same
    # Copies of each expert on each device, where a reference (the published EPLB) puts several of
    # one on a device: `placement` cannot say so and names the device once. None: as `placement`.
    copies_LED: NDArray[np.int64] | None = None

    @property
    def gap(self) -> float:
        """(objective - bound) / bound: 0 where the plan is proved best."""
        return self.objective / self.bound - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a solver says while it works."""

    objective: float
    bound: float
    done: float  # 0 to 1, of the work it plans to do
    seconds: float


class Solver(Protocol):
    """`search`, `ilp`, and the references of `compare`."""

    name: str

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """`report` is called now and then; the solver ends with the best so far where it answers
        False, and after `seconds` (None: a default of the solver). Raises PlacementError where it
        cannot make a plan.
        """
        ...
