"""The input and the result of a part of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`trace`: an npz of a recorded routing, if there is one; `published`: the published
    `eplb.py`, whose time says how fast the machine is; `quick`: few layers, to try it; `without`:
    the parts of the solvers that the ablation leaves out one at a time, all if empty."""

    trace: Path | None = None
    published: Path | None = None
    quick: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A target, and if it was met."""

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
    """`rows` go to the JSON file as they are, and under `columns` to the screen."""

    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, object]]
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


Run = Callable[[Setting], Iterator[PartResult]]


@dataclass(slots=True)
class Stopwatch:
    """Times of one piece of work: wall time, and CPU time of this process, which other work on the
    machine disturbs less."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Filled in at the end."""
    watch = Stopwatch()
    wall, cpu = time.perf_counter(), time.process_time()
    yield watch
    watch.wall_s, watch.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
