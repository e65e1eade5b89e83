"""Changes the plan for one workload to another workload with few moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from experts.placement.judge.copies import copies_of
from experts.placement.problem.devices import even_devices
from experts.placement.problem.placement import Placement
from experts.placement.problem.plan_limits import Move
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.references import Eplb
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import distances, workloads
from placement.part import Bar, PartResult, Setting, balance_of, figures, scenario

_PAIRS = ((0, 1), (2, 7), (4, 5))
_BUDGETS = (4, 8, 16)


def run(setting: Setting) -> Iterator[PartResult]:
    """Runs three drifts with three budgets; the target is for 8 copies per layer."""
    loads = workloads(12, 4 if setting.quick else 58, 256)
    devices = even_devices(32, 4, 288)
    apart_SS = distances(loads)
    rows: list[dict[str, object]] = []
    recovered_8 = []
    for before, after in _PAIRS[: 1 if setting.quick else None]:
        old = PlacementProblem(loads=scenario(loads, before), devices=devices)
        new = PlacementProblem(loads=scenario(loads, after), devices=devices)
        current = Search().solve(old)
        stale, fresh = balance_of(new, current), Search().solve(new)
        best = balance_of(new, fresh)
        eplb = Eplb().solve(new)
        renamed = Search().solve(replace(new, move=Move(current=current.placement)))
        first = {
            "from, to": f"{loads.scenarios[before]}, {loads.scenarios[after]}",
            "apart": round(float(apart_SS[before, after]), 3),
        }
        rows.append(first | _row("as it is", figures(stale), 0.0, 0.0))
        for budget in _BUDGETS:
            move = Move(current=current.placement, max_copies_per_layer=budget)
            plan = Search().solve(replace(new, move=move))
            balance = balance_of(new, plan)
            recovered = float((balance.mean() - stale.mean()) / (best.mean() - stale.mean()))
            moved = _moved(current.placement, plan.placement)
            rows.append(
                first | _row(f"at most {budget}", figures(balance), recovered, moved, plan.seconds)
            )
            if budget == 8:
                recovered_8.append(recovered)
        for name, plan in (("anew", renamed), ("EPLB", eplb)):
            moved = _moved(current.placement, plan.placement)
            balance = balance_of(new, plan)
            recovered = float((balance.mean() - stale.mean()) / (best.mean() - stale.mean()))
            rows.append(first | _row(name, figures(balance), recovered, moved, plan.seconds))
    yield PartResult(
        title="moved to another workload, 32 devices, 32 replicas, 256 experts",
        columns=tuple(rows[0]),
        rows=rows,
        bars=[
            Bar(
                name="8 moves a layer recover what drift lost",
                wanted="at least 50%",
                got=f"{min(recovered_8):.0%} in the worst of {len(recovered_8)}",
                is_met=min(recovered_8) >= 0.5,
            )
        ],
    )


def _row(
    name: str, balance: str, recovered: float, moved: float, seconds: float = 0.0
) -> dict[str, object]:
    return {
        "moves": name,
        "balance": balance,
        "recovered": f"{recovered:.0%}",
        "copies a layer": round(moved, 1),
        "s": round(seconds, 2),
    }


def _moved(current: Placement, plan: Placement) -> float:
    layers = sorted(plan.ranks_of)
    before_LED, after_LED = copies_of(current, layers), copies_of(plan, layers)
    return float(np.maximum(after_LED - before_LED, 0).sum() / len(layers))
