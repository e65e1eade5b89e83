"""Measures the time of planning, compared with EPLB in plain Python."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Solution
from experts.placement.solvers.references import Eplb
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import workloads
from placement.part import Bar, PartResult, Setting, Stopwatch, timed

_REPEATS = 5
_CELLS = ((8, 0), (8, 32), (16, 32), (32, 32), (64, 64), (128, 128))


def run(setting: Setting) -> Iterator[PartResult]:
    """Returns the best of several times, because other programs only add time. CPU time is this
    process's.
    """
    num_layers = 4 if setting.quick else 58
    one, many = workloads(1, num_layers, 256), workloads(12, num_layers, 256)
    rows: list[dict[str, object]] = []
    for num_devices, num_replicas in _CELLS:
        problem = _problem(one, num_devices, num_replicas)
        repeats = _REPEATS if num_devices <= 64 else 1
        search, eplb = _best(Search().solve, problem, repeats), _best(Eplb().solve, problem)
        rows.append(_row(num_devices, num_replicas, 1, search, eplb))
        if (num_devices, num_replicas) == (32, 32):
            single = search
    problem = _problem(many, 32, 32)
    several = _best(Search().solve, problem, repeats=1 if setting.quick else 2)
    rows.append(_row(32, 32, 12, several, None))
    notes = [
        "judged by CPU time of this process; eplb is this project's own plain Python, which is "
        "quicker than the published program"
    ]
    if setting.published is not None:
        notes.append(_beside(setting.published, one, single))
    yield PartResult(
        title=f"planning {num_layers} layers of 256 experts, one thread",
        columns=tuple(rows[0]),
        rows=rows,
        bars=[
            _bar("one load vector, 32 devices, 32 replicas", single, 0.150),
            _bar("12 workloads, 32 devices, 32 replicas", several, 5.0),
        ],
        notes=notes,
    )


def _problem(loads: ExpertLoads, num_devices: int, num_replicas: int) -> PlacementProblem:
    devices = even_devices(num_devices, 1, loads.num_experts + num_replicas)
    return PlacementProblem(loads=loads, devices=devices)


def _best(
    solve: Callable[[PlacementProblem], Solution],
    problem: PlacementProblem,
    repeats: int = _REPEATS,
) -> Stopwatch:
    watches = []
    for _ in range(repeats):
        with timed() as watch:
            solve(problem)
        watches.append(watch)
    return Stopwatch(
        wall_s=min(watch.wall_s for watch in watches), cpu_s=min(watch.cpu_s for watch in watches)
    )


def _row(
    num_devices: int,
    num_replicas: int,
    num_scenarios: int,
    search: Stopwatch,
    eplb: Stopwatch | None,
) -> dict[str, object]:
    return {
        "devices": num_devices,
        "replicas": num_replicas,
        "workloads": num_scenarios,
        "search, CPU ms": round(search.cpu_s * 1e3),
        "search, ms": round(search.wall_s * 1e3),
        "eplb, CPU ms": "-" if eplb is None else round(eplb.cpu_s * 1e3),
        "ratio": "-" if eplb is None else round(eplb.cpu_s / search.cpu_s, 2),
    }


def _bar(name: str, watch: Stopwatch, most_s: float) -> Bar:
    return Bar(
        name=name,
        wanted=f"under {most_s * 1e3:.0f} ms",
        got=f"{watch.cpu_s * 1e3:.0f} ms of CPU, {watch.wall_s * 1e3:.0f} ms by the clock",
        is_met=watch.cpu_s < most_s,
    )


def _beside(path: Path, loads: ExpertLoads, search: Stopwatch) -> str:
    """Times the published program on the same loads, with 32 devices and 32 replicas."""
    import torch

    spec = importlib.util.spec_from_file_location("published_eplb", path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    weight_LE = torch.from_numpy(loads.counts_SLE[0])
    watches = []
    for _ in range(_REPEATS):
        with timed() as watch:
            module.rebalance_experts(weight_LE, loads.num_experts + 32, 1, 1, 32)
        watches.append(watch.cpu_s)
    return (
        f"the published EPLB takes {min(watches) * 1e3:.0f} ms of CPU here, "
        f"{min(watches) / search.cpu_s:.1f} times the search"
    )
