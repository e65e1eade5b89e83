"""Sends the requests of a run, counts them, and measures whether the client kept up.

If the client did not keep up, the figures describe the client, not the server.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_serve.bench.client.answer import AnswerReader
from moe_serve.bench.client.connection import Clock, ConnectionPool, Target
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Spread
from moe_serve.bench.workload.prompt_maker import Ready

_LAG_STEP_S = 0.02
# Above these a warning says that the client is the bottleneck.
MAX_LATENESS_P99_MS = 50.0
MAX_LAG_P99_MS = 50.0
MAX_CPU = 0.9


@dataclass(slots=True)
class RunProgress:
    """Counts the requests of a run; the client updates it and the display reads it."""

    num_sent: int = 0
    num_ok: int = 0
    num_failed: int = 0
    num_events: int = 0  # with tokens
    num_in_flight: int = 0
    peak_in_flight: int = 0


class LoadClient:
    """Sends requests to one server in one way. Times come from `now`."""

    def __init__(
        self,
        target: Target,
        *,
        path: str,
        api_key: str | None,
        is_stream: bool,
        timeout_s: float,
        now: Clock,
    ) -> None:
        self.progress = RunProgress()
        self._head = target.head(path, api_key)
        self._pool = ConnectionPool(target, now)
        self._is_stream, self._timeout_s, self._now = is_stream, timeout_s, now

    async def send(self, request: Ready, scheduled_s: float | None = None) -> RequestRecord:
        """Sends one request and reads its whole answer. `scheduled_s` None means that it is due
        now."""
        progress = self.progress
        progress.num_sent += 1
        progress.num_in_flight += 1
        progress.peak_in_flight = max(progress.peak_in_flight, progress.num_in_flight)
        started = self._now()
        try:
            answer = await self._ask(request)
        finally:
            progress.num_in_flight -= 1
        progress.num_ok += answer.error is None
        progress.num_failed += answer.error is not None
        record = answer.record(
            index=request.index,
            scheduled_s=started if scheduled_s is None else scheduled_s,
            started_s=started,
            wanted_tokens=request.output_tokens,
        )
        return replace(record, tier=request.tier, tenant=request.tenant, session=request.session)

    def close(self) -> None:
        self._pool.close()

    async def _ask(self, request: Ready) -> AnswerReader:
        content = b"".join((self._head, str(len(request.body)).encode(), b"\r\n\r\n", request.body))
        try:
            return await asyncio.wait_for(
                self._pool.ask(content, self._new_answer), self._timeout_s
            )
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return self._failed("timeout", f"no answer in {self._timeout_s:g} s")
        except OSError as error:
            return self._failed("not connected", str(error) or type(error).__name__)

    def _new_answer(self) -> AnswerReader:
        return AnswerReader(is_stream=self._is_stream, on_token=self._count_token)

    def _count_token(self) -> None:
        self.progress.num_events += 1

    def _failed(self, kind: str, detail: str) -> AnswerReader:
        answer = AnswerReader(is_stream=self._is_stream)
        answer.fail(self._now(), kind, detail)
        return answer


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
