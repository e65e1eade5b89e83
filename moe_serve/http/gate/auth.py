"""API keys: every route needs one, except probes and pages without data.

Routes under /admin need an admin key instead. They are disabled if none is configured.
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

# Probes of orchestrators, and the dashboard's pages, which contain no data.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", *PAGE_FILES})
ADMIN_PREFIX = "/admin"
KEY_IN_SCOPE = "moe_serve.api_key"  # the scope's entry with the digest of the request's key


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request. `name` is the digest of its key, or its address without a key."""

    name: str
    settings: KeySettings


_STRANGER = Client("", NO_SETTINGS)
_client: ContextVar[Client] = ContextVar("moe_serve_client", default=_STRANGER)


class ApiKeyMiddleware:
    """Checks the key of every request. New routes need a key until OPEN_PATHS names them."""

    def __init__(self, app: ASGIApp, keys: KeyRing, admin_keys: KeyRing) -> None:
        self._app, self._keys, self._admin_keys = app, keys, admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope)
        if error is not None:
            await error.response(scope["path"])(scope, receive, send)
            return
        _client.set(self._client_of(scope))  # for the task of this request
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The reason for a refusal. None: the request is allowed, and the scope has its key's
        digest."""
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
    """The owner of a request's data: the digest of its key, or "" if the server has no keys."""
    digest: bytes | None = request.scope.get(KEY_IN_SCOPE)
    return "" if digest is None else digest.hex()


def current_client() -> Client:
    """The client of the request that the current task serves."""
    return _client.get()


def _given_key(headers: Headers) -> bytes:
    """The key as OpenAI's or Anthropic's clients send it; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    # not all whitespace: a UTF-8 character may end in a byte that Latin-1 treats as a blank
    return key.strip(" \t").encode("latin-1")


def _key_error(kind: str) -> ApiError:
    return ApiError(
        401,
        f"A valid {kind} key is required. Send it as 'Authorization: Bearer <key>' or as "
        "'X-Api-Key: <key>'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
    )


def _admin_error() -> ApiError:
    return ApiError(
        403,
        "The routes under /admin are disabled, because server.admin_keys is not configured.",
        code="admin_disabled",
        headers={"Connection": "close"},
    )
