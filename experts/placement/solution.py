"""A plan with its proved bound, and the interface of the solvers that make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import objective_of
from experts.placement.judge.bound import Bound, lower_bound
from experts.placement.judge.copies import copies_of, num_layers_with_repeats, placement_of
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placement with its objective and a proved lower bound.

    `objective` and `bound` are means over layers of the mean over scenarios of the largest load of
    a device over the mean load of a device (relative to its speed). 1 is perfect; balancedness is
    close to 1 / objective. With `activated` the mean load is that of one copy of each expert,
    because more copies activate more.
    """

    placement: Placement
    objective: float
    bound: float  # no plan of this problem has a smaller objective
    bound_proof: str  # the reason, in one line
    solver: str
    seconds: float
    # False if a deadline or Ctrl-C ended the search; the plan is valid all the same
    is_complete: bool
    # Copies of each expert on each device, set only where a reference solver (the published EPLB)
    # puts several copies of one expert on a device. `placement` names such a device once.
    copies_LED: NDArray[np.int64] | None = None

    @property
    def gap(self) -> float:
        """(objective - bound) / bound; 0 if the plan is proved optimal."""
        return self.objective / self.bound - 1.0

    def copies(self) -> NDArray[np.int64]:
        """Returns the copies [L, E, D], including those that a reference puts beside another on the
        same device."""
        if self.copies_LED is not None:
            return self.copies_LED
        return copies_of(self.placement, sorted(self.placement.ranks_of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress report of a running solver."""

    objective: float
    bound: float
    done: float  # share of the planned work, 0 to 1
    seconds: float


class Solver(Protocol):
    """The interface of `search`, `ilp` and the reference solvers of `compare`."""

    name: str

    def solve(
        self,
        problem: PlacementProblem,
        *,
        seconds: float | None = None,
        report: Callable[[Progress], bool] | None = None,
    ) -> Solution:
        """Solves a problem, with the best plan found within `seconds` (None: the solver's default).

        `report` is called from time to time; if it returns False the solver ends with its best plan
        so far. Raises PlacementError if no plan can be made.
        """
        ...


def judged(
    problem: PlacementProblem,
    copies_LED: NDArray[np.int64],
    *,
    solver: str,
    seconds: float,
    is_complete: bool = True,
    bound: Bound | None = None,
) -> Solution:
    """Returns a plan with its objective and its bound. `copies_LED` is as in `copies.py`; pass
    `bound` if it is known already."""
    found = lower_bound(problem) if bound is None else bound
    return Solution(
        placement=placement_of(copies_LED, problem.loads.layers),
        objective=objective_of(problem, copies_LED),
        bound=found.value,
        bound_proof=found.proof,
        solver=solver,
        seconds=seconds,
        is_complete=is_complete,
        copies_LED=copies_LED if num_layers_with_repeats(copies_LED) else None,
    )
