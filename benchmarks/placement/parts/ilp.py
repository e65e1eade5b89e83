"""Measures what the integer program adds to the search: quality of the plan, and time."""

from __future__ import annotations

from collections.abc import Iterator

from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import Move, PlacementProblem
from experts.placement.solvers.ilp.ilp_solver import IlpSolver
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import read_halves, workloads
from placement.part import Bar, PartResult, Setting, balance_of, figures, scenario, timed

_CELLS = ((4, 0), (8, 0), (8, 8), (16, 16))  # devices, replicas
_COLUMNS = ("loads", "devices", "replicas", "moves", "search", "ilp", "gap", "s", "proof")
_SECONDS = 30.0


def run(setting: Setting) -> Iterator[PartResult]:
    """Uses six layers of the trace, if there is one, and small invented loads with few moves."""
    rows: list[dict[str, object]] = []
    if setting.trace is not None:
        loads = read_halves(setting.trace).whole.loads("all")
        some = _layers(loads, range(0, len(loads.layers), 4))
        for num_devices, num_replicas in _CELLS[:1] if setting.quick else _CELLS:
            devices = even_devices(num_devices, 1, loads.num_experts + num_replicas)
            rows.append(_row("gpt-oss-20b", PlacementProblem(loads=some, devices=devices)))
    made_up = workloads(2, 4, 16)
    devices = even_devices(4, 1, 20)
    now, then = (scenario(made_up, index) for index in range(2))
    current = Search().solve(PlacementProblem(loads=now, devices=devices)).placement
    for num_moves in (1, 2, 4):
        move = Move(current=current, max_copies_per_layer=num_moves)
        problem = PlacementProblem(loads=then, devices=devices, move=move)
        rows.append(_row("made-up, 16 experts", problem))
    is_kept = all(bool(row["is_kept"]) for row in rows)
    yield PartResult(
        title=f"The integer program after the search, {_SECONDS:.0f} s",
        columns=_COLUMNS,
        rows=rows,
        bars=[
            Bar(
                name="ilp: never worse than the search",
                wanted=f"all {len(rows)} rows",
                got="so" if is_kept else "not so",
                is_met=is_kept,
            )
        ],
    )


def _row(name: str, problem: PlacementProblem) -> dict[str, object]:
    search = Search().solve(problem)
    with timed() as watch:
        ilp = IlpSolver().solve(problem, seconds=_SECONDS)
    move = problem.move
    return {
        "loads": name,
        "devices": len(problem.devices),
        "replicas": problem.num_replicas,
        "moves": "" if move is None else move.max_copies_per_layer,
        "search": figures(balance_of(problem, search)),
        "ilp": figures(balance_of(problem, ilp)),
        "gap": f"{ilp.gap:.2%}",
        "s": f"{watch.wall_s:.1f}",
        "proof": ilp.bound_proof.split(". ")[0],
        "is_kept": ilp.objective <= search.objective + 1e-9,
    }


def _layers(loads: ExpertLoads, rows: range) -> ExpertLoads:
    return ExpertLoads(
        counts_SLE=loads.counts_SLE[:, rows],
        layers=tuple(loads.layers[row] for row in rows),
        scenarios=loads.scenarios,
    )
