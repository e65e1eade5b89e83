"""The input and the result of a part of the benchmark, and the balancedness of any plan on loads.

S scenarios, L layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The input of a part.

    `trace` is an npz of a recorded routing, if there is one. `published` is the published
    `eplb.py`, which is timed as a measure of the machine's speed. `quick` uses few layers.
    `without` names the parts of the solvers that the ablation leaves out one at a time; empty means
    all.
    """

    trace: Path | None = None
    published: Path | None = None
    quick: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A target, and whether it was met."""

    name: str
    wanted: str
    got: str
    is_met: bool

    def __str__(self) -> str:
        return (
            f"{'met' if self.is_met else 'MISSED'}: {self.name}: {self.got} (wanted {self.wanted})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """A table of results: `rows` go to the JSON file, and are printed under `columns`."""

    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, object]]
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Run = Callable[[Setting], Iterator[PartResult]]


@dataclass(slots=True)
class Stopwatch:
    """The wall time of a piece of work, and the CPU time of this process, which other programs
    affect less.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Yields a stopwatch whose times are set at the end of the block."""
    watch = Stopwatch()
    wall, cpu = time.perf_counter(), time.process_time()
    yield watch
    watch.wall_s, watch.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


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
