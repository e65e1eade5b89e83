"""The input and the result of a part of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


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
