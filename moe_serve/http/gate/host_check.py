"""What comes over loopback must be meant for it.

A web page can point its own name at 127.0.0.1 (DNS rebinding): its requests then come from this
machine's browser, over loopback, but with the page's name in the Host header. Refused are those
under /admin, and where no API key stands in their way those that carry an Origin (a browser's plain
reads of its own page's name do not) or read what the server counts.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.http.gate.auth import ADMIN_PREFIX
from moe_serve.http.schema.errors import ApiError

_PRIVATE = (".localhost", ".internal")  # nobody can buy these: host.docker.internal
# Not health and models: they tell a name, and a proxy's clients without keys read them.
COUNTS = frozenset({"/metrics", "/dashboard/state", "/load", "/startup"})


class HostMiddleware:
    """`allowed`: other names that are fine, such as those that a proxy here passes on; "*": any."""

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
        is_admin = scope["path"].startswith(ADMIN_PREFIX)
        is_telling = "origin" in headers or scope["path"] in COUNTS
        if not is_admin and (self._has_keys or not is_telling):
            return False
        name = host_name(headers.get("host", ""))
        is_own = is_loopback_name(name) or name.endswith(_PRIVATE)
        return name not in self._allowed and not is_own


def host_name(host: str) -> str:
    """Of a Host header, without its port."""
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
        f"This server was reached over loopback as {host[:100]!r}, which is no name of it: use "
        "localhost, or add the name to server.allowed_hosts.",
        code="misdirected_request",
        headers={"Connection": "close"},
    )
