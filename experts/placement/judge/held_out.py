"""Judges plans on loads that they were not made for: holds out each scenario once, and measures
drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import Balancedness, balancedness
from experts.placement.placement_error import PlacementError
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem

_MOST = 8  # scenarios that are held out, evenly picked


@dataclass(frozen=True, slots=True)
class NamedPlanner:
    """A solver by name. `plan` returns the copies [L, E, D] of its plan, and raises PlacementError
    if it cannot make one."""

    name: str
    plan: Callable[[PlacementProblem], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutScenario:
    """Balancedness on a scenario, mean and worst layer."""

    scenario: str
    drift: float  # total variation from the mean of the others, mean over layers
    seen: Balancedness  # of the plan that was made with it
    unseen: Balancedness  # of a plan that was made without it
    default: Balancedness | None  # of the engines' own, made without it


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Distances between scenarios, and the results of holding out each."""

    scenarios: tuple[str, ...]
    drift_SS: list[list[float]]
    held_out: list[HeldOutScenario]
    solver: str  # of plans without a scenario
    is_like_plan: bool  # the same solver made the plan for all
    default: str


def hold_out(
    problem: PlacementProblem,
    copies_LED: NDArray[np.int64],
    solver: NamedPlanner,
    default: NamedPlanner,
    *,
    is_like_plan: bool,
    is_ended: Callable[[], bool],
) -> HeldOut:
    """Holds out each scenario. `copies_LED` is the plan for all; once `is_ended` returns True, the
    remaining scenarios are left out."""
    names, shares_SLE = problem.loads.scenarios, problem.loads.shares_SLE()
    seen = balancedness(problem, copies_LED)
    found = []
    for index in range(0, len(names), -(-len(names) // _MOST)):
        others_LE = np.delete(shares_SLE, index, axis=0).mean(axis=0)
        unseen = _unseen(problem, index, solver)
        if is_ended() or unseen is None:
            break
        found.append(
            HeldOutScenario(
                scenario=names[index],
                drift=_variation(shares_SLE[index], others_LE),
                seen=seen[names[index]],
                unseen=unseen,
                default=_unseen(problem, index, default),
            )
        )
    return HeldOut(
        scenarios=names,
        drift_SS=[[_variation(one, other) for other in shares_SLE] for one in shares_SLE],
        held_out=found,
        solver=solver.name,
        is_like_plan=is_like_plan,
        default=default.name,
    )


def _unseen(problem: PlacementProblem, index: int, planner: NamedPlanner) -> Balancedness | None:
    """Returns the balancedness of a scenario under the plan for the others; None if the solver
    cannot make a plan."""
    others = [row for row in range(len(problem.loads.scenarios)) if row != index]
    without = replace(problem, loads=_some(problem.loads, others))
    alone = replace(problem, loads=_some(problem.loads, [index]))
    try:
        copies_LED = planner.plan(without)
    except PlacementError:
        return None
    return balancedness(alone, copies_LED)[problem.loads.scenarios[index]]


def _some(loads: ExpertLoads, rows: list[int]) -> ExpertLoads:
    return replace(
        loads,
        counts_SLE=loads.counts_SLE[rows],
        scenarios=tuple(loads.scenarios[row] for row in rows),
    )


def _variation(one_LE: NDArray[np.float64], other_LE: NDArray[np.float64]) -> float:
    """Returns half of the sum of absolute differences of shares: 0 is identical, 1 is nothing in
    common."""
    return float(np.abs(one_LE - other_LE).sum(axis=1).mean() / 2)
