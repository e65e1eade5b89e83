"""Measures whether the client kept up; if it did not, the figures describe the client, not the
server."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Spread

_LAG_STEP_S = 0.02
# Above these a warning says that the client is the bottleneck.
MAX_LATENESS_P99_MS = 50.0
MAX_LAG_P99_MS = 50.0
MAX_CPU = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """The load and the lateness of the client. `lateness` is set only in an open loop: a closed
    loop has no planned times."""

    cpu: float  # of one core, 0 to 1
    loop_lag: Spread | None  # how late the event loop woke a timer
    lateness: Spread | None  # sent after it was due

    def warnings(self) -> list[str]:
        found = []
        if self.cpu > MAX_CPU:
            found.append(f"it used {self.cpu:.0%} of a core")
        if self.loop_lag is not None and self.loop_lag.p99 > MAX_LAG_P99_MS:
            found.append(f"its event loop was {self.loop_lag.p99:.0f} ms late (p99)")
        if self.lateness is not None and self.lateness.p99 > MAX_LATENESS_P99_MS:
            found.append(f"it sent requests {self.lateness.p99:.0f} ms late (p99)")
        if not found:
            return []
        return [
            f"the client was a bottleneck: {' and '.join(found)}; "
            "run it on another machine or with less load, as these figures are partly its own."
        ]


class HealthMeter:
    """Measures the client during a run: run `watch` as a task, then call `result`."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_LAG_STEP_S)
            self._lags.append(max(0.0, time.perf_counter() - before - _LAG_STEP_S))

    def result(self, records: Sequence[RequestRecord], *, is_open: bool) -> ClientHealth:
        wall = max(1e-9, time.perf_counter() - self._wall)
        lateness = np.array([record.lateness_s for record in records]) if is_open else ()
        return ClientHealth(
            cpu=(time.process_time() - self._cpu) / wall,
            loop_lag=Spread.of(self._lags),
            lateness=Spread.of(lateness),
        )


def allow_open_files(num_wanted: int) -> int:
    """Raises the soft limit of file descriptors if necessary and returns the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_wanted:
        return num_wanted
    allowed = num_wanted if hard == resource.RLIM_INFINITY else min(num_wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
