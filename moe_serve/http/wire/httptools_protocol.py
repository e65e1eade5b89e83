"""uvicorn's httptools protocol, with limits for each connection and a check of each head.

The parser refuses a head with contradictory body lengths. `head_error` refuses heads that are legal
for the parser but ambiguous: of two Host or key headers, one program on the way may use the first
and another the last.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moe_serve.http.schema.api_error import ApiError
from moe_serve.http.wire.body_writer import offer_body_writer
from moe_serve.http.wire.transports import (
    HEAD_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    ConnectionGuard,
    DirectTransport,
    PatientTransport,
    late_head_error,
)

MAX_HEAD_BYTES = 64 * 1024
RawHeaders = Sequence[tuple[bytes, bytes]]  # names in lower case

# Headers that must not have several values.
_SINGLE = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"x-api-key",
    }
)
_HOST = re.compile(rb"(\[[\w:.%]+\]|[\w.~!$&'()*+;=%\x80-\xff-]*)(:\d*)?", re.ASCII)


def head_error(
    version: str, url: bytes, headers: RawHeaders, *, asks_for_upgrade: bool
) -> ApiError | None:
    """Returns an error for a head that is too large or ambiguous, else None."""
    num_bytes = sum(len(name) + len(value) + 4 for name, value in headers)
    if num_bytes + len(url) > MAX_HEAD_BYTES:
        return large_head_error()
    if version not in ("1.0", "1.1"):
        message = f"The server supports HTTP/1.1 and HTTP/1.0, got HTTP/{version}."
        return ApiError(505, message, code="http_version_not_supported")
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _SINGLE and name in values:
            return _repeated_error(name)
        values[name] = value
    return _host_error(version, values) or _framing_error(version, values, asks_for_upgrade)


def large_head_error() -> ApiError:
    message = f"The request line and headers are larger than the limit of {MAX_HEAD_BYTES} bytes."
    return ApiError(431, message, code="headers_too_large")


def large_trailer_error() -> ApiError:
    message = (
        "The trailers after the body, or the extensions of a chunk, are larger than the limit "
        f"of {MAX_HEAD_BYTES} bytes."
    )
    return ApiError(431, message, code="headers_too_large")


def malformed_error() -> ApiError:
    return ApiError(400, "This is not a valid HTTP/1.1 request.", code="invalid_http")


def _repeated_error(name: bytes) -> ApiError:
    message = f"The request has more than one {name.decode().title()} header. Send it only once."
    return ApiError(400, message, code="repeated_header")


def _host_error(version: str, values: dict[bytes, bytes]) -> ApiError | None:
    host = values.get(b"host")
    if host is None:
        if version == "1.0":
            return None
        return ApiError(400, "An HTTP/1.1 request needs a Host header.", code="invalid_host")
    if _HOST.fullmatch(host.strip(b" \t")):
        return None
    message = (
        f"The Host header {host[:100].decode('latin-1')!r} is not a host name with an optional "
        "port."
    )
    return ApiError(400, message, code="invalid_host")


def _framing_error(
    version: str, values: dict[bytes, bytes], asks_for_upgrade: bool
) -> ApiError | None:
    coding = values.get(b"transfer-encoding")
    if coding is not None and version == "1.0":
        return ApiError(400, "HTTP/1.0 does not support Transfer-Encoding.", code="invalid_http")
    if coding is not None and coding.strip(b" \t").lower() != b"chunked":
        shown = coding[:60].decode("latin-1")
        message = f"The Transfer-Encoding must be chunked, got {shown!r}."
        return ApiError(501, message, code="unsupported_transfer_encoding")
    has_body = coding is not None or values.get(b"content-length", b"0").strip() != b"0"
    if asks_for_upgrade and has_body:  # the parser would skip the body of such a request
        return _upgrade_error()
    return None


def _upgrade_error() -> ApiError:
    message = (
        "A request with a body must not ask for another protocol. Send it as HTTP/1.1, without "
        "an Upgrade header."
    )
    return ApiError(400, message, code="upgrade_with_body")


class _RefusedHeadError(Exception):
    """Raised inside the parser to stop it; uvicorn then calls send_400_response."""


class GuardedHttpToolsProtocol(HttpToolsProtocol):
    """An HTTP/1.1 protocol that refuses late, large or ambiguous requests.

    The parser calls on_message_begin, on_headers_complete, on_body ..., on_message_complete.
    """

    head_timeout_s: ClassVar[float] = HEAD_TIMEOUT_S
    write_timeout_s: ClassVar[float] = WRITE_TIMEOUT_S

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._guard = ConnectionGuard(
            self.loop,
            self._end_late_head,
            head_timeout_s=self.head_timeout_s,
            write_timeout_s=self.write_timeout_s,
        )
        self._has_begun = False  # a head has begun and not ended
        self._is_in_body = False
        self._refusal: ApiError | None = None  # the error, if it is known
        # Bytes received since the segment with the head's first byte, or with the body's last one.
        self._num_head_bytes = 0
        # `cycle` may already be the next request, which waits
        self._served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if transport.get_extra_info("sslcontext") is not None:
            wrapped: Any = PatientTransport(transport, self.loop, self.write_timeout_s)
        else:
            wrapped = DirectTransport(transport)
        super().connection_made(wrapped)
        self._guard.open(wrapped)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.close()
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._guard.is_refused or self.transport.is_closing():
            return
        if not self._is_in_body:
            self._guard.begin_head()
        self._num_head_bytes += len(data)
        super().data_received(data)  # resets the count where a head begins
        is_large = self._num_head_bytes > MAX_HEAD_BYTES
        if is_large and (self._has_begun or self._is_in_body) and not self._guard.is_refused:
            self._refusal = large_head_error() if self._has_begun else large_trailer_error()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._has_begun, self._num_head_bytes = True, 0
        self._guard.begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drops trailers: as a header, a trailer could add a key or a length after the checks."""
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_begun, self._num_head_bytes = False, 0
        self._guard.end_head()
        version, asks_for_upgrade = self.parser.get_http_version(), self.parser.should_upgrade()
        error = head_error(version, self.url, self.headers, asks_for_upgrade=asks_for_upgrade)
        if error is not None:
            self._refusal = error
            raise _RefusedHeadError
        super().on_headers_complete()
        self._is_in_body = True

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._unset_keepalive_if_required()
        if not self._can_refuse:
            self.transport.close()
            return
        if self._is_in_body:  # the application sees a disconnected client
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        error = self._refusal or malformed_error()
        self._guard.refuse(error, self.server_state.default_headers)

    def _unset_keepalive_if_required(self) -> None:
        """Keeps the timer for the rest of a body whose request was answered: it would not be set
        again."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        if not (self._is_in_body and is_answered) or self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._served = cycle
        scope: Any = cycle.scope
        if scope["http_version"] == "1.0":
            app = _CloseDelimited(app, cycle)
        offer_body_writer(scope, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        self._guard.stall_writing()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._guard.resume_writing()
        super().resume_writing()

    @property
    def _can_refuse(self) -> bool:
        """True if the client would take an error for the answer to the request that is being
        read."""
        if self._is_in_body:
            return self.cycle is self._served and not self.cycle.response_started
        return not self._is_answering

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: HTTP allows a server to ignore an upgrade, and some clients always ask for
        one."""

    def _end_late_head(self) -> None:
        if self._is_answering:  # the answer keeps the connection open
            self._guard.begin_head()
        elif self._has_begun:
            self._guard.refuse(late_head_error(), self.server_state.default_headers)
        else:
            self.transport.close()


class _CloseDelimited:
    """Wraps an application for HTTP/1.0 clients, which do not know chunks.

    An answer without a length ends with the connection. uvicorn closes the connection after every
    answer to such a client.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app, self._cycle = app, cycle
        self._has_length = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_chunks(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                self._has_length = b"content-length" in names
                if not self._has_length:
                    self._cycle.chunked_encoding = False  # set here, so that uvicorn adds no chunks
            elif not self._has_length:  # each part has the length that uvicorn expects
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_without_chunks)
