"""Tracks the phases of the server's start, their durations, and the planned memory."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Literal

from moe_serve.config.logs import STARTUP_LOG
from moe_serve.engine.memory.memory_plan import MemoryPlan

_log = logging.getLogger(STARTUP_LOG)

PhaseName = Literal["checking", "downloading", "loading", "preparing", "ready"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of the start. `seconds` grow until it ends. `done` of `total` tensors are loaded, or
    bytes downloaded; 0 if not reported."""

    name: PhaseName
    seconds: float
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        unit = "bytes" if self.name == "downloading" else "tensors"
        counts = f", {self.done} of {self.total} {unit}" if self.total else ""
        return f"{self.name}{counts} after {self.seconds:.0f} s"


class Startup:
    """The progress of the start. Written by the thread that starts the server; read by any thread.

    checking: configuration, tokenizer, memory (as part of downloading, if there is that);
    downloading: a model given by its name on a hub; loading: weights, KV pages, ranks; preparing:
    routes; ready.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: list[Phase] = []
        self._name: PhaseName = "checking"
        self._since = time.monotonic()
        self._done = self._total = 0
        self.plan: MemoryPlan | None = None

    def begin(self, name: PhaseName) -> None:
        """Begins a phase, which ends the previous one."""
        with self._lock:
            ended = self._now()
            self._ended.append(ended)
            self._name, self._since, self._done, self._total = name, time.monotonic(), 0, 0
        _log.info("%s ended after %.1f s: %s", ended.name, ended.seconds, name)

    def note_progress(self, done: int, total: int) -> None:
        """Implements LoadProgress."""
        self._done, self._total = done, total

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that have ended and the current one. The phase "ready" takes no time."""
        with self._lock:
            return (*self._ended, self._now())

    def _now(self) -> Phase:
        seconds = 0.0 if self._name == "ready" else time.monotonic() - self._since
        return Phase(name=self._name, seconds=seconds, done=self._done, total=self._total)
