"""API keys: every route needs one, except those that an orchestrator probes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.http.errors import ApiError

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})


class ApiKeyMiddleware:
    """Default-deny: a route that is added later is closed until it is named in OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "lifespan" or (
            scope["type"] == "http" and scope["path"] in OPEN_PATHS
        )
        if is_open or not self._digests or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer <key>'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await error.response()(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)
