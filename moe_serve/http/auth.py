"""API keys: every route needs one, except those that an orchestrator probes.

What is under /admin needs an admin key instead, and is off where none is configured.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.http.errors import ApiError

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
ADMIN_PREFIX = "/admin"


class ApiKeyMiddleware:
    """Default-deny: a route that is added later is closed until it is named in OPEN_PATHS."""

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str] = ()
    ) -> None:
        self._app = app
        self._digests, self._admin_digests = _digests(api_keys), _digests(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why the request goes no further; None: it does."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return None
        if scope["path"].startswith(ADMIN_PREFIX):
            if not self._admin_digests:
                return _admin_error()
            is_let_in = _has_key(Headers(scope=scope), self._admin_digests)
            return None if is_let_in else _key_error("admin")
        if not self._digests or _has_key(Headers(scope=scope), self._digests):
            return None
        return _key_error("API")


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _has_key(headers: Headers, digests: Sequence[bytes]) -> bool:
    """Whether it is one of these keys; takes as long whichever it is."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
    matches = [hmac.compare_digest(digest, known) for known in digests]
    return any(matches)


def _key_error(kind: str) -> ApiError:
    return ApiError(
        401,
        f"A valid {kind} key is needed: send it as 'Authorization: Bearer <key>'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
    )


def _admin_error() -> ApiError:
    return ApiError(
        403,
        "The routes under /admin are off: this server has no server.admin_keys.",
        code="admin_disabled",
        headers={"Connection": "close"},
    )
