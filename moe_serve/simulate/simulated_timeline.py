"""Writes a simulated run as Chrome's trace events: the steps of cells, and the requests.

A cell is a process of the trace. Its first thread has the steps; requests are asynchronous events
in two parts, until the first token and until the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_serve.errors import ConfigError
from moe_serve.simulate.steps_ahead import RequestTimes, StepsDone

_MICRO = 1e6


class SimulatedTimeline:
    """Collects the events of a run."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._cells: set[int] = set()

    def append_steps(self, cell: int, done: StepsDone, num_running: int) -> None:
        """Adds steps of a cell, in which `num_running` requests were in progress."""
        self._name(cell)
        begins = (done.begin_s, *done.ends[:-1])
        for begin_s, end_s in zip(begins, done.ends, strict=True):
            self._events.append(
                {
                    "name": "step",
                    "ph": "X",
                    "pid": cell,
                    "tid": 0,
                    "ts": round(_MICRO * begin_s, 3),
                    "dur": round(_MICRO * (end_s - begin_s), 3),
                    "args": {"tokens": len(done.deltas), "requests": num_running},
                }
            )

    def append_requests(self, jobs: Iterable[RequestTimes]) -> None:
        """Adds the requests of a run that has ended."""
        for job in jobs:
            first_s = job.token_times[0] if job.token_times else job.end_s
            for name, begin_s, end_s in (
                ("first token", job.due_s, first_s),
                ("answer", first_s, job.end_s),
            ):
                for phase, at_s in (("b", begin_s), ("e", end_s)):
                    self._events.append(
                        {
                            "name": name,
                            "cat": "request",
                            "ph": phase,
                            "id": job.index,
                            "pid": job.cell,
                            "tid": 1,
                            "ts": round(_MICRO * at_s, 3),
                        }
                    )

    def write(self, path: Path) -> None:
        """Writes the file. Raises ConfigError."""
        document = {"traceEvents": self._events, "displayTimeUnit": "ms"}
        try:
            path.write_text(json.dumps(document), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}.") from None

    def _name(self, cell: int) -> None:
        if cell not in self._cells:
            self._cells.add(cell)
            name = {"name": f"cell {cell}"}
            self._events.append({"name": "process_name", "ph": "M", "pid": cell, "args": name})
