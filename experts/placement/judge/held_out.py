"""Judges plans on loads that they were not made for: holds out each scenario once, and measures
drift."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.errors import PlacementError
from experts.placement.judge.balance import Balancedness, balancedness
from experts.placement.judge.plan_judge import solution_copies
from experts.placement.problem.loads import ExpertLoads
from experts.placement.solution import Solution
from experts.placement.sources import Posed
from moe_serve.cli.place.place_solve import (
    REFERENCES,
    Interrupts,
    engine_default,
    make_solver,
    solve,
)

_MOST = 8  # scenarios that are held out, evenly picked


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
    posed: Posed, solution: Solution, seconds: float | None, interrupts: Interrupts
) -> HeldOut:
    """Holds out each scenario. `solution` is the plan for all, and `seconds` limits each plan
    without one.

    The solver is the same, except that the search replaces solvers that take minutes for each plan
    (`ilp`) or need more than loads (`fan-out`). After Ctrl-C the remaining scenarios are left out.
    """
    problem, default = posed.problem, engine_default(posed)
    solver = solution.solver if solution.solver in REFERENCES else "search"
    copies_LED = solution_copies(solution, problem)
    names, shares_SLE = problem.loads.scenarios, problem.loads.shares_SLE()
    seen = balancedness(problem, copies_LED)
    found = []
    for index in range(0, len(names), -(-len(names) // _MOST)):
        others_LE = np.delete(shares_SLE, index, axis=0).mean(axis=0)
        unseen = _unseen(posed, index, solver, seconds, interrupts)
        if interrupts.has_come or unseen is None:
            break
        found.append(
            HeldOutScenario(
                scenario=names[index],
                drift=_variation(shares_SLE[index], others_LE),
                seen=seen[names[index]],
                unseen=unseen,
                default=_unseen(posed, index, default, seconds, interrupts),
            )
        )
    return HeldOut(
        scenarios=names,
        drift_SS=[[_variation(one, other) for other in shares_SLE] for one in shares_SLE],
        held_out=found,
        solver=solver,
        is_like_plan=solver == solution.solver,
        default=default,
    )


def _unseen(
    posed: Posed, index: int, name: str, seconds: float | None, interrupts: Interrupts
) -> Balancedness | None:
    """Returns the balancedness of a scenario under the plan for the others; None if the solver
    cannot make a plan."""
    problem, solver = posed.problem, make_solver(name, posed)
    others = [row for row in range(len(problem.loads.scenarios)) if row != index]
    without = replace(problem, loads=_some(problem.loads, others))
    alone = replace(problem, loads=_some(problem.loads, [index]))
    try:
        solution = solve(solver, without, seconds, interrupts)
    except PlacementError:
        return None
    scenario = problem.loads.scenarios[index]
    return balancedness(alone, solution_copies(solution, without))[scenario]


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
