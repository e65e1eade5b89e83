"""Runs a batch: sends a limited number of lines at once and writes rows as answers arrive.

A server at a URL answers the lines, or the application in this process.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from moe_serve.cli.run_batch.batch_output import (
    BatchLine,
    BatchOutput,
    BatchRow,
    read_line,
    repeated,
)
from moe_serve.cli.server_client import ServerAddress, is_distrust, no_connection, trusted
from moe_serve.errors import ConfigError, EngineDeadError

OWN_URL = "http://moe-serve"  # of the application in this process
NUM_TRIES = 6  # tries of a line whose connection broke or that a full queue refused
_MAX_WAIT_S = 30.0
_RETRIED = frozenset({429, 503})
_JSON = {"Content-Type": "application/json"}
_HEALTH_PATHS = (
    "/health/live",
    "/v1/models",
)  # routes that show readiness: of moe-serve, and of any other server


class BatchTarget:
    """Sends lines to a server. Use `async with`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        pause_s: float = 0.5,
    ) -> None:
        self._pause_s = pause_s  # before the second try; doubles with each further try
        address = ServerAddress.parse(url, api_key)
        self.url = address.url
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=address.headers,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            verify=trusted(),
            trust_env=address.uses_proxies,
        )

    async def __aenter__(self) -> BatchTarget:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raises EngineDeadError if the server does not answer, ConfigError if the key is wrong."""
        try:
            answer = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            if is_distrust(error):
                raise ConfigError(no_connection(str(self.url), error)) from None
            raise self._gone() from None
        if answer.status_code in (401, 403):
            raise ConfigError(f"{self.url} refuses the API key: give --api-key KEY, or @FILE.")

    async def send(self, line: BatchLine) -> BatchRow:
        """Sends the line and returns its row. Raises EngineDeadError if the server is gone: then no
        row is written, and another run can send the line again.
        """
        # The body is ASCII, so that the server gets, and refuses, half of a surrogate pair or NaN.
        content = json.dumps(dict(line.body)).encode()
        problem = ""
        for attempt in range(NUM_TRIES):
            wait_s = min(_MAX_WAIT_S, self._pause_s * 2**attempt) * random.uniform(0.5, 1.0)
            is_last = attempt == NUM_TRIES - 1
            try:
                answer = await self._client.post(line.url, content=content, headers=_JSON)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                await asyncio.sleep(0 if is_last else wait_s)
                continue
            if is_last or answer.status_code not in _RETRIED:
                return _row(line, answer)
            await asyncio.sleep(max(wait_s, _asked_wait_s(answer)))
        if not await self._is_there():
            raise self._gone()
        return BatchRow(
            number=line.number,
            custom_id=line.custom_id,
            error_code="connection_error",
            error_message=f"the connection broke {NUM_TRIES} times: {problem}.",
        )

    async def _is_there(self) -> bool:
        for path in _HEALTH_PATHS:
            try:
                answer = await self._client.get(path)
            except httpx.HTTPError:
                return False
            if answer.status_code != 404:
                return answer.status_code < 500
        return True

    def _gone(self) -> EngineDeadError:
        return EngineDeadError(
            f"no server answers at {self.url}. The answers so far are kept: start the "
            "server, and run the same command again."
        )


def _row(line: BatchLine, answer: httpx.Response) -> BatchRow:
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    return BatchRow(
        number=line.number,
        custom_id=line.custom_id,
        status=answer.status_code,
        request_id=answer.headers.get("x-request-id", ""),
        body=body,
    )


def _asked_wait_s(answer: httpx.Response) -> float:
    """Returns the seconds that `Retry-After` requests, within reason."""
    try:
        seconds = float(answer.headers.get("retry-after", "0"))
    except ValueError:
        return 0.0
    return min(_MAX_WAIT_S, seconds) if math.isfinite(seconds) and seconds > 0 else 0.0


AHEAD_LINES = 64  # lines read ahead

Numbered = tuple[int, bytes]  # from 1


class BatchReader:
    """Hands out lines in order to several tasks of the running loop. Use `with`.

    The thread opens the input and reads it, as both may wait for a producer. It is a daemon, so
    that it can be abandoned at the end if it still waits.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._found = asyncio.Queue[Numbered | BaseException | None]()
        self._room = threading.Semaphore(AHEAD_LINES)
        self._lock = threading.Lock()  # of the following
        self._is_closed = False

    def __enter__(self) -> BatchReader:
        threading.Thread(target=self._read, name="batch-reader", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._is_closed = True
        self._room.release()

    async def next(self) -> Numbered | None:
        """Returns the next line; None after the last one. Raises the error that reading raised."""
        found = await self._found.get()
        if isinstance(found, tuple):
            self._room.release()
            return found
        self._found.put_nowait(found)  # every waiting task gets the end
        if found is not None:
            raise found
        return None

    def _read(self) -> None:
        try:
            for numbered in enumerate(self._lines, start=1):
                self._room.acquire()
                if not self._hand_over(numbered):
                    return
            self._hand_over(None)
        except BaseException as error:
            self._hand_over(error)

    def _hand_over(self, found: Numbered | BaseException | None) -> bool:
        """Hands a line over. Returns False if no more lines are wanted; the loop may have ended
        then.
        """
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._found.put_nowait, found)
            return not self._is_closed


@dataclass(slots=True)
class BatchCount:
    """Counts of the lines so far."""

    answered: int = 0
    refused: int = 0  # the server answered with an error
    bad: int = 0  # never sent, or never answered
    skipped: int = 0  # an earlier run wrote their rows
    num_tokens: int = 0  # that were generated
    begun: float | None = None  # when the first line could be sent
    on_change: Callable[[BatchCount], None] = field(default=lambda _: None, repr=False)

    @property
    def num_lines(self) -> int:
        return self.answered + self.refused + self.bad + self.skipped

    @property
    def num_failed(self) -> int:
        return self.refused + self.bad

    def add(self, row: BatchRow) -> None:
        if row.is_good:
            self.answered += 1
            self.num_tokens += _num_generated(row)
        elif row.status is not None:
            self.refused += 1
        else:
            self.bad += 1
        self.on_change(self)

    def skip(self) -> None:
        self.skipped += 1
        self.on_change(self)


async def run_lines(
    lines: Iterable[bytes],
    output: BatchOutput,
    target: BatchTarget,
    concurrency: int,
    count: BatchCount,
) -> None:
    """Answers the lines that have no row yet. Errors of the target are raised; rows that are
    written stay.

    A thread iterates over `lines`, and keeps waiting if the next line does not arrive.
    """
    with BatchReader(lines) as reader:
        todo = _Todo(reader, output, count)
        workers = [
            asyncio.create_task(_work(todo, output, target, count))
            for _ in range(max(1, concurrency))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _work(todo: _Todo, output: BatchOutput, target: BatchTarget, count: BatchCount) -> None:
    while (line := await todo.next()) is not None:
        row = await target.send(line)
        output.append(row)
        count.add(row)


class _Todo:
    """Lines to send; other lines are skipped, or get their rows at once."""

    def __init__(self, reader: BatchReader, output: BatchOutput, count: BatchCount) -> None:
        self._reader, self._output, self._count = reader, output, count
        self._first: dict[str, int] = {}  # custom_id -> its line

    async def next(self) -> BatchLine | None:
        """Returns the next line for any worker; None after the last one."""
        while (numbered := await self._reader.next()) is not None:
            number, text = numbered
            if text.strip() and (line := self._to_send(number, text)) is not None:
                return line
        return None

    def _to_send(self, number: int, text: bytes) -> BatchLine | None:
        line = read_line(number, text)
        first = number if line.custom_id is None else self._first.setdefault(line.custom_id, number)
        if line.custom_id is not None and first != number:
            line = repeated(number, line.custom_id, first)
        if self._output.has(number, line.custom_id):
            self._count.skip()
        elif isinstance(line, BatchRow):
            self._output.append(line)
            self._count.add(line)
        else:
            return line
        return None


def _num_generated(row: BatchRow) -> int:
    """Returns the generated tokens from the usage of chat and text completions, or of responses and
    messages."""
    usage = row.body.get("usage") if isinstance(row.body, dict) else None
    if not isinstance(usage, dict):
        return 0
    number = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return number if isinstance(number, int) else 0
