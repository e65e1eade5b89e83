"""Plans for one load vector: balancedness compared with EPLB's and with the bound.

Plans are judged on the same prompts and on the other half of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.bound import lower_bound
from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.references import Consecutive, Eplb
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import read_halves, workloads, zipf_loads
from placement.part import Bar, PartResult, Setting, balance_of, figures

Floats = NDArray[np.float64]
_TRACE_CELLS = ((8, 0), (8, 8), (16, 0), (16, 16), (32, 0), (32, 32))
_COLUMNS = ("devices", "replicas", "linear", "eplb", "eplb groups", "search", "bound", "ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Balancedness [L] for one number of devices and replicas; `eplb_groups` if these divide."""

    name: str
    eplb_L: Floats
    eplb_groups_L: Floats | None
    search_L: Floats
    bound_L: Floats

    @property
    def is_no_worse(self) -> bool:
        rivals = [self.eplb_L] + ([] if self.eplb_groups_L is None else [self.eplb_groups_L])
        return all(
            self.search_L.mean() >= rival_L.mean() - 1e-9
            and self.search_L.min() >= rival_L.min() - 1e-9
            for rival_L in rivals
        )

    @property
    def gap_where_it_binds(self) -> float | None:
        """Returns the mean gap to the bound over layers whose bound exceeds the mean load."""
        binds_L = self.bound_L < 1.0 - 1e-9
        if not binds_L.any():
            return None
        return float(1.0 - (self.search_L / self.bound_L)[binds_L].mean())


def run(setting: Setting) -> Iterator[PartResult]:
    """Uses the trace, if there is one, and then invented loads."""
    if setting.trace is not None:
        yield from _on_trace(setting)
    sets = [
        ("Zipf 0.8", zipf_loads(4 if setting.quick else 16, 256), ((8, 0), (32, 32), (64, 64))),
        ("Zipf 0.8", zipf_loads(4 if setting.quick else 16, 64), ((16, 16), (32, 0), (32, 32))),
        (
            "one workload",
            workloads(1, 4 if setting.quick else 58, 256),
            ((8, 0), (8, 32), (16, 0), (16, 32), (32, 0), (32, 32), (64, 0), (64, 64)),
        ),
    ]
    for name, loads, cells in sets:
        yield _table(
            f"{name}, {loads.num_experts} experts, {len(loads.layers)} layers", loads, cells
        )


def _on_trace(setting: Setting) -> Iterator[PartResult]:
    assert setting.trace is not None, "there is a trace"
    halves = read_halves(setting.trace)
    whole = halves.whole.loads("all")
    yield _table("gpt-oss-20b, planned and judged on all prompts", whole, _TRACE_CELLS)
    planned, held_out = halves.planned.loads("half"), halves.held_out.loads("other half")
    yield _table("gpt-oss-20b, judged on the half it was planned on", planned, _TRACE_CELLS)
    title = "gpt-oss-20b, judged on the other half of the prompts"
    yield _table(title, planned, _TRACE_CELLS, held_out)
    groups = halves.planned_groups
    yield _table(f"{title}, planned on four groups", groups, _TRACE_CELLS, held_out)


def _table(
    title: str,
    loads: ExpertLoads,
    cells: tuple[tuple[int, int], ...],
    judged_on: ExpertLoads | None = None,
) -> PartResult:
    rows, found = [], []
    for num_devices, num_replicas in cells:
        row, cell = _cell(loads, num_devices, num_replicas, judged_on)
        rows.append(row)
        found.append(cell)
    result = PartResult(title=title, columns=_COLUMNS, rows=rows)
    worse = [cell.name for cell in found if not cell.is_no_worse]
    result.bars.append(
        Bar(
            name=f"{title}: mean and worst layer at least EPLB's",
            wanted=f"all {len(found)} cells",
            got=f"{len(found) - len(worse)}" + (f", not {', '.join(worse)}" if worse else ""),
            is_met=not worse,
        )
    )
    if judged_on is None:
        result.bars.extend(_bound_bars(title, found))
    return result


def _bound_bars(title: str, found: list[_Cell]) -> list[Bar]:
    bars = []
    gaps = {cell.name: gap for cell in found if (gap := cell.gap_where_it_binds) is not None}
    if gaps:
        name, worst = max(gaps.items(), key=lambda item: item[1])
        bars.append(
            Bar(
                name=f"{title}: at the bound where it is not trivial",
                wanted="within 0.5% mean",
                got=f"{worst:.3%} in the worst of {len(gaps)} cells ({name})",
                is_met=worst <= 0.005,
            )
        )
    for cell in found:
        if cell.name == "16 devices, 16 replicas" and "all prompts" in title:
            bars.append(
                Bar(
                    name="gpt-oss-20b, 16 devices, 16 replicas, in sample",
                    wanted="0.990/0.985",
                    got=figures(cell.search_L),
                    is_met=bool(cell.search_L.mean() >= 0.990 and cell.search_L.min() >= 0.985),
                )
            )
    return bars


def _cell(
    loads: ExpertLoads, num_devices: int, num_replicas: int, judged_on: ExpertLoads | None
) -> tuple[dict[str, object], _Cell]:
    num_nodes = max(1, num_devices // 8)
    devices = even_devices(num_devices, num_nodes, loads.num_experts + num_replicas)
    problem = PlacementProblem(loads=loads, devices=devices)
    linear, eplb = Consecutive().solve(problem), Eplb().solve(problem)  # EPLB: of the average
    search = Search().solve(problem)
    eplb_L = balance_of(problem, eplb, judged_on)[0]
    search_L = balance_of(problem, search, judged_on)[0]
    try:
        grouped = Eplb(num_groups=8, hierarchical=True).solve(problem)
        groups_L = balance_of(problem, grouped, judged_on)[0]
    except PlacementError:  # experts, slots or devices that eight groups do not divide
        groups_L = None
    bound_L = 1.0 / lower_bound(problem).by_SL[0]
    row = {
        "devices": num_devices,
        "replicas": num_replicas,
        "linear": figures(balance_of(problem, linear, judged_on)),
        "eplb": figures(eplb_L),
        "eplb groups": "-" if groups_L is None else figures(groups_L),
        "search": figures(search_L),
        "bound": figures(bound_L) if judged_on is None else "-",
        "ms": round(search.seconds * 1e3),
    }
    cell = _Cell(
        name=f"{num_devices} devices, {num_replicas} replicas",
        eplb_L=eplb_L,
        eplb_groups_L=groups_L,
        search_L=search_L,
        bound_L=bound_L,
    )
    return row, cell
