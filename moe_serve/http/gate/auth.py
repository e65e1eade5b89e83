"""API keys: every route needs one, except what an orchestrator probes and pages without data.

What is under /admin needs an admin key instead, and is off where none is configured.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.http.gate.key_ring import NO_SETTINGS, KeyRing, KeySettings
from moe_serve.http.pages.page_files import PAGE_FILES
from moe_serve.http.schema.errors import ApiError

# What an orchestrator probes, and the dashboard's pages, which hold no data.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", *PAGE_FILES})
ADMIN_PREFIX = "/admin"
KEY_IN_SCOPE = "moe_serve.api_key"  # where the digest of a request's key is


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request: the digest of its key, else its address, and what its key may ask for."""

    name: str
    settings: KeySettings


_STRANGER = Client("", NO_SETTINGS)
_client: ContextVar[Client] = ContextVar("moe_serve_client", default=_STRANGER)


class ApiKeyMiddleware:
    """Default-deny: a route that is added later is closed until it is named in OPEN_PATHS."""

    def __init__(self, app: ASGIApp, keys: KeyRing, admin_keys: KeyRing) -> None:
        self._app, self._keys, self._admin_keys = app, keys, admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope)
        if error is not None:
            await error.response(scope["path"])(scope, receive, send)
            return
        _client.set(self._client_of(scope))  # for this request's task
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why the request goes no further; None: it does, with its key's digest in the scope."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return None
        given = _given_key(Headers(scope=scope))
        if scope["path"].startswith(ADMIN_PREFIX):
            if self._admin_keys.is_empty:
                return _admin_error()
            return _key_error("admin") if self._admin_keys.find(given) is None else None
        if self._keys.is_empty:
            return None
        scope[KEY_IN_SCOPE] = self._keys.find(given)
        return _key_error("API") if scope[KEY_IN_SCOPE] is None else None

    def _client_of(self, scope: Scope) -> Client:
        digest: bytes | None = scope.get(KEY_IN_SCOPE)
        if digest is None:
            address = scope.get("client") or ("",)
            return Client(str(address[0]), NO_SETTINGS)
        return Client(digest.hex(), self._keys.settings(digest))


def owner_of(request: Request) -> str:
    """Who asks, as far as keys tell: the digest of the key; "" where none is needed."""
    digest: bytes | None = request.scope.get(KEY_IN_SCOPE)
    return "" if digest is None else digest.hex()


def current_client() -> Client:
    """Return the client of the request that the current task serves."""
    return _client.get()


def _given_key(headers: Headers) -> bytes:
    """As OpenAI's clients send it, or as Anthropic's do; empty: there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip(" \t").encode("latin-1")  # a character of UTF-8 may end as other blanks do


def _key_error(kind: str) -> ApiError:
    return ApiError(
        401,
        f"A valid {kind} key is needed: send it as 'Authorization: Bearer <key>' or as "
        "'X-Api-Key: <key>'.",
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
