"""How a plan does on loads that it was not made for: each scenario held out once, and drift."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.errors import PlacementError
from experts.placement.judge.balance import Balancedness, balancedness
from experts.placement.problem.loads import ExpertLoads
from experts.placement.solution import Solution
from moe_serve.cli.place.place_judge import solution_copies
from moe_serve.cli.place.place_order import Posed
from moe_serve.cli.place.place_solve import Interrupts, solve
from moe_serve.cli.place.place_solvers import REFERENCES, engine_default, make_solver

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
    """Distances between scenarios, and each held out."""

    scenarios: tuple[str, ...]
    drift_SS: list[list[float]]
    held_out: list[HeldOutScenario]
    solver: str  # of plans without a scenario
    is_like_plan: bool  # which made the plan for all, too
    default: str


def hold_out(
    posed: Posed, solution: Solution, seconds: float | None, interrupts: Interrupts
) -> HeldOut:
    """`solution`: the plan for all; `seconds`: of each plan without one. By the same solver, but by
    the search where that takes minutes for each (`ilp`), or needs more than loads (`fan-out`).
    Ctrl-C leaves out what is not done yet."""
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
    """Of a scenario under the plan for the others; None where the solver cannot make one."""
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
    """Half of the sum of differences of shares: 0 alike, 1 nothing in common."""
    return float(np.abs(one_LE - other_LE).sum(axis=1).mean() / 2)
