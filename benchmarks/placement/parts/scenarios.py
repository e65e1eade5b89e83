"""Makes one plan for twelve workloads, compared with the plan for their average and each one's
own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.references import Eplb
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import distances, workloads
from placement.part import (
    Bar,
    PartResult,
    Setting,
    average,
    balance_of,
    figures,
    scenario,
    timed,
    without,
)

_NUM_SCENARIOS, _NUM_DEVICES, _NUM_REPLICAS = 12, 32, 32


def run(setting: Setting) -> Iterator[PartResult]:
    """Judges plans on the loads that they were made for, and then on each left-out workload (on
    fewer layers).
    """
    loads = workloads(_NUM_SCENARIOS, 4 if setting.quick else 58, 256)
    devices = even_devices(_NUM_DEVICES, 4, 256 + _NUM_REPLICAS)
    problem = PlacementProblem(loads=loads, devices=devices)
    own_S = np.array(
        [
            balance_of(alone, Search().solve(alone)).mean()
            for index in range(_NUM_SCENARIOS)
            for alone in [PlacementProblem(loads=scenario(loads, index), devices=devices)]
        ]
    )
    mean_problem = PlacementProblem(loads=average(loads), devices=devices)
    with timed() as watch:
        search = Search().solve(problem)
    plans = {
        "EPLB on the average": Eplb().solve(mean_problem),
        "search on the average": Search().solve(mean_problem),
        "search on all": search,
    }
    rows: list[dict[str, object]] = []
    worst = {}
    for name, plan in plans.items():
        balance_SL = balance_of(problem, plan)
        ratio_S = balance_SL.mean(axis=1) / own_S
        worst[name] = float(ratio_S.min())
        rows.append(
            {
                "plan": name,
                "mean": round(float(balance_SL.mean()), 4),
                "worst workload": round(float(balance_SL.mean(axis=1).min()), 4),
                "worst layer": round(float(balance_SL.min()), 4),
                "of its own plan, worst": round(worst[name], 4),
                "s": round(plan.seconds, 2),
            }
        )
    apart_SS = distances(loads)
    apart = apart_SS[np.triu_indices(len(apart_SS), 1)]
    yield PartResult(
        title=f"{_NUM_SCENARIOS} workloads, {len(loads.layers)} layers of 256 experts, 32 devices, "
        "32 replicas",
        columns=tuple(rows[0]),
        rows=rows,
        bars=[
            Bar(
                name="worst workload of one plan beside that workload's own plan",
                wanted="at least 97%, where the average-load plan has 90% or less",
                got=f"{worst['search on all']:.1%}, where the average-load plan has "
                f"{worst['search on the average']:.1%}",
                is_met=worst["search on all"] >= 0.97 and worst["search on the average"] <= 0.9,
            )
        ],
        notes=[
            f"total variation between workloads: {apart.min():.3f} to {apart.max():.3f}, median "
            f"{np.median(apart):.3f}; planning took {watch.cpu_s:.2f} s of this process's time"
        ],
    )
    yield _left_out(setting)


def _left_out(setting: Setting) -> PartResult:
    """Leaves out every third workload, because each needs a plan of the eleven others."""
    loads = workloads(_NUM_SCENARIOS, 4 if setting.quick else 12, 256)
    devices = even_devices(_NUM_DEVICES, 4, 256 + _NUM_REPLICAS)
    apart_SS = distances(loads) + 9.0 * np.eye(_NUM_SCENARIOS)
    rows: list[dict[str, object]] = []
    for index in range(0, _NUM_SCENARIOS, 3):
        others = without(loads, index)
        alone = scenario(loads, index)
        problem = PlacementProblem(loads=others, devices=devices)
        mean_problem = PlacementProblem(loads=average(others), devices=devices)
        rows.append(
            {
                "left out": loads.scenarios[index],
                "nearest": round(float(apart_SS[index].min()), 3),
                "EPLB on the average": _mean(mean_problem, Eplb(), alone),
                "search on the average": _mean(mean_problem, Search(), alone),
                "search on the others": _mean(problem, Search(), alone),
            }
        )
    return PartResult(
        title=f"the same, judged on a workload that was left out ({len(loads.layers)} layers)",
        columns=tuple(rows[0]),
        rows=rows,
    )


def _mean(problem: PlacementProblem, solver: Search | Eplb, judged_on: ExpertLoads) -> str:
    return figures(balance_of(problem, solver.solve(problem), judged_on))
