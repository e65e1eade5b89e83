"""Checks the head of a request before the application sees it.

The parser refuses a head with contradictory body lengths. This module refuses heads that are legal
for the parser but ambiguous: of two Host or key headers, one program on the way may use the first
and another the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe_serve.http.schema.errors import ApiError

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
