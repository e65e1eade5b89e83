"""Sends the requests of a run and keeps count of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from moe_serve.bench.client.answer import AnswerReader
from moe_serve.bench.client.connection import Clock, ConnectionPool, Target
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.workload.prompt_maker import Ready


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
        return answer.record(
            index=request.index,
            scheduled_s=started if scheduled_s is None else scheduled_s,
            started_s=started,
            wanted_tokens=request.output_tokens,
        )

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
