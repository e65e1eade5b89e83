"""A plan with its objective and its bound, whoever made it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import objective_of
from experts.placement.judge.bound import Bound, lower_bound
from experts.placement.judge.copies import num_layers_with_repeats, placement_of
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Solution


def judged(
    problem: PlacementProblem,
    copies_LED: NDArray[np.int64],
    *,
    solver: str,
    seconds: float,
    is_complete: bool = True,
    bound: Bound | None = None,
) -> Solution:
    """`copies_LED` as in `copies.py`; `bound` where it is known already."""
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
