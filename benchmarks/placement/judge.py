"""Computes the balancedness of any plan on loads. S scenarios, L layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Solution


def balance_of(
    problem: PlacementProblem, solution: Solution, loads: ExpertLoads | None = None
) -> NDArray[np.float64]:
    """Returns mean load / largest load [S, L], on the problem's own loads or on others."""
    copies_LED = solution.copies_LED
    if copies_LED is None:
        copies_LED = copies_of(solution.placement, problem.loads.layers)
    judged = problem if loads is None else replace(problem, loads=loads, move=None)
    loads_SLD = device_loads(judged, copies_LED)
    return np.asarray(loads_SLD.mean(axis=2) / loads_SLD.max(axis=2))


def figures(balance_SL: NDArray[np.float64]) -> str:
    """Formats the mean over layers and the worst layer."""
    return f"{balance_SL.mean():.4f}/{balance_SL.min():.4f}"


def scenario(loads: ExpertLoads, index: int) -> ExpertLoads:
    """Returns the problem with a single one of its scenarios."""
    return ExpertLoads(
        counts_SLE=loads.counts_SLE[index : index + 1],
        layers=loads.layers,
        scenarios=(loads.scenarios[index],),
    )


def without(loads: ExpertLoads, index: int) -> ExpertLoads:
    """Returns the problem with all scenarios except one."""
    kept = [other for other in range(len(loads.scenarios)) if other != index]
    return ExpertLoads(
        counts_SLE=loads.counts_SLE[kept],
        layers=loads.layers,
        scenarios=tuple(loads.scenarios[other] for other in kept),
    )


def average(loads: ExpertLoads) -> ExpertLoads:
    """Returns the problem with the mean of all scenarios, each with the same weight."""
    return ExpertLoads(
        counts_SLE=loads.shares_SLE().mean(axis=0, keepdims=True),
        layers=loads.layers,
        scenarios=("average",),
    )
