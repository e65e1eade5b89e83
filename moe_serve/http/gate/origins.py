"""Refuses requests over loopback that name another host, and requests from other origins (CORS).

A web page can let its own name point to 127.0.0.1 (DNS rebinding). Its requests then come from this
machine's browser over loopback, but with the page's name in the Host header. Refused are such
requests under /admin and, if no API keys protect the server, those with an Origin header and those
that read counts. (A browser sends no Origin when a page reads from its own name.)
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.http.gate.auth import is_admin_path
from moe_serve.http.schema.api_error import ApiError

# names that cannot be registered, such as host.docker.internal
_PRIVATE = (".localhost", ".internal")
# Health and models are left out: they only show a name, and proxies read them without a key.
COUNTS = frozenset({"/metrics", "/dashboard/state", "/load", "/startup"})
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = (
    "X-Request-Id",
    "X-Ignored-Parameters",
    "X-Predicted-Ttft-Ms",
    "Retry-After",
    "Retry-After-Ms",
)


class HostMiddleware:
    """Checks the Host header. `allowed`: other accepted names, such as those of a local proxy; "*":
    any."""

    def __init__(self, app: ASGIApp, allowed: Collection[str], *, has_keys: bool) -> None:
        self._app, self._has_keys = app, has_keys
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_foreign(scope):
            error = _error(Headers(scope=scope).get("host", ""))
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        server = scope.get("server")
        if "*" in self._allowed or server is None or not is_loopback_name(str(server[0])):
            return False
        headers = Headers(scope=scope)
        is_admin = is_admin_path(scope["path"])
        is_telling = "origin" in headers or scope["path"] in COUNTS
        if not is_admin and (self._has_keys or not is_telling):
            return False
        name = host_name(headers.get("host", ""))
        is_own = is_loopback_name(name) or name.endswith(_PRIVATE)
        return name not in self._allowed and not is_own


def host_name(host: str) -> str:
    """Returns the name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def is_loopback_name(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _error(host: str) -> ApiError:
    return ApiError(
        421,
        f"This server was reached over loopback under the name {host[:100]!r}, which is not "
        "allowed. Use localhost, or add the name to server.allowed_hosts.",
        code="misdirected_request",
        headers={"Connection": "close"},
    )


class ConfiguredCors(CORSMiddleware):
    """Handles CORS before the keys: a browser's preflight request has no key. Cookies are not
    allowed."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """A refused preflight gets the same error envelope as other errors."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = (
            "This origin, method or header is not allowed. server.cors_origins lists the "
            f"allowed origins; the allowed methods are {', '.join(_METHODS)}."
        )
        return ApiError(403, message, code="cors_refused").response()
