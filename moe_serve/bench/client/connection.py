"""One HTTP/1.1 connection that sends prepared bytes and passes the answer on as it is read.

A general-purpose client spends several times as much on each piece of a stream, and with many
streams that cost would be measured. Here the clock is read as soon as the event loop has the bytes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from moe_serve.bench.client.answer import AnswerReader
from moe_serve.errors import BenchError

_PREDICTED = b"x-predicted-ttft-ms"  # when the server expects the first token
_LINGER_S = 0.5  # after [DONE] the body should end at once; if it does not, the connection goes

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The address of a server. `prefix` is the part of the URL before /v1."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> Target:
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BenchError(f"{url} is not a URL: {error}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{url} is not a URL such as http://127.0.0.1:8000.")
        return cls(
            host=parts.hostname,
            port=port,
            is_tls=parts.scheme == "https",
            prefix=parts.path.rstrip("/"),
        )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, path: str, api_key: str | None) -> bytes:
        """Returns the start of a POST request, up to the length of its body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: moe-serve-bench",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
        ]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        return "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")


class Connection(asyncio.Protocol):
    """One connection that takes one request at a time. `is_open` is true while it can take
    another."""

    def __init__(self, now: Clock) -> None:
        self.is_open = False
        self._now = now
        self._at = 0.0  # when the piece that is parsed now was read
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: AnswerReader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._has_length = False
        self._linger: asyncio.TimerHandle | None = None

    async def exchange(self, request: bytes, answer: AnswerReader) -> None:
        """Sends a request and returns when `answer` is done. Cancelling closes the connection."""
        assert self._transport is not None and self._ended is None, "one request at a time"
        self._answer, self._has_length = answer, False
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._answer = self._ended = self._parser = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transport is not a subclass of it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._at = self._now()
        if self._parser is None:
            self.close()  # an answer without a request
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("broken answer", f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._at = self._now()
        if self._answer is None:
            return
        if self._answer.has_bytes and not self._has_length and error is None:
            self._answer.finish(self._at)  # a body without a length ends with the connection
            self._wake()
        else:
            self._fail("connection lost", str(error or "the server closed it"))

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif name == _PREDICTED and self._answer is not None:
            self._answer.predicted(value)

    def on_headers_complete(self) -> None:
        assert self._parser is not None and self._answer is not None, "inside an exchange"
        self._answer.head(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        assert self._answer is not None, "inside an exchange"
        self._answer.body(self._at, piece)
        if self._answer.error is not None and self._answer.is_done:
            self.close()
            self._wake()
        elif self._answer.is_done and self._linger is None:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(_LINGER_S, self._end_lingering)

    def on_message_complete(self) -> None:
        assert self._parser is not None and self._answer is not None, "inside an exchange"
        self._answer.finish(self._at)
        if not self._parser.should_keep_alive():
            self.close()
        self._wake()

    def _end_lingering(self) -> None:
        self._linger = None
        self.close()
        self._wake()

    def _fail(self, kind: str, detail: str) -> None:
        if self._answer is not None:
            self._answer.fail(self._at, kind, detail)
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class ConnectionPool:
    """Open connections to one server, one for each request in progress."""

    def __init__(self, target: Target, now: Clock) -> None:
        self._target, self._now = target, now
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def ask(self, request: bytes, make_answer: Callable[[], AnswerReader]) -> AnswerReader:
        """Returns the finished answer. A connection that the server closed while idle is
        replaced."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                answer = await self._exchange(connection, request, make_answer())
                if answer.error != "connection lost" or answer.has_bytes:
                    return answer
                break
        return await self._exchange(await self._connect(), request, make_answer())

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(
        self, connection: Connection, request: bytes, answer: AnswerReader
    ) -> AnswerReader:
        await connection.exchange(request, answer)
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._now), self._target.host, self._target.port, ssl=self._tls
        )
        return connection
