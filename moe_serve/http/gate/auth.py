"""API keys: every route needs one, except probes and pages without data.

Routes under /admin need an admin key instead. They are disabled if none is configured. Keys come
from the configuration and from a file, and are kept as digests. A key may be followed by its own
settings on the same line, as in `s3cret min_priority=-10 tier=interactive,flex tenant=acme`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.config.keys import RANGES
from moe_serve.config.sections import SchedulerConfig, ServerConfig
from moe_serve.config.sources import read_secret_file, split_key
from moe_serve.errors import ConfigError
from moe_serve.http.pages.page_files import PAGE_FILES
from moe_serve.http.schema.api_error import ApiError
from moe_serve.http.schema.file_watch import FileWatch

_LOGGER = logging.getLogger(__name__)
_LOOK_S = 1.0  # seconds between two checks of the file
_INTEGER = re.compile(r"-?[0-9]{1,10}")
_TENANT = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_SETTINGS = {
    "min_priority": "min_priority=NUMBER",
    "tier": "tier=NAME,NAME",
    "tenant": "tenant=NAME",
    "tighten": "tighten=yes or no",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """Settings of one key that replace those of the configuration; None: not set."""

    min_priority: int | None = None
    tiers: tuple[str, ...] = ()  # tiers that it may name, its default first; empty: not set
    tenant: str | None = None  # keys of the same tenant share
    may_tighten: bool | None = None  # whether targets may be tighter than those of the tier


NO_SETTINGS = KeySettings()


class KeyRing:
    """A set of keys. `file` has one key per line and is read again when it changes.

    Raises ConfigError if the file cannot be read at the start. Later, if a changed file cannot be
    read or contains no key, the keys stay unchanged: a half-written file neither locks out nor
    admits clients.
    """

    def __init__(
        self, keys: Sequence[str], file: str | None = None, tiers: Sequence[str] | None = None
    ) -> None:
        """`tiers` are the tiers that the lines may name; with None the names are not checked."""
        self._tiers = tiers
        self._fixed, self._file = self._parsed(keys), file
        self._watch = FileWatch(() if file is None else (file,))
        self._keys = self._fixed | ({} if file is None else self._parsed(read_secret_file(file)))
        self._next_look = time.monotonic() + _LOOK_S

    @property
    def is_empty(self) -> bool:
        """True if no key is required."""
        return not self._keys

    def find(self, key: bytes) -> bytes | None:
        """Returns the key's digest if it is in the ring. The time does not depend on which key
        matches."""
        self._look()
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return digest if any(matches) else None

    def settings(self, digest: bytes) -> KeySettings:
        """Returns the settings of a key that `find` has returned."""
        return self._keys.get(digest, NO_SETTINGS)

    def _parsed(self, lines: Iterable[str]) -> dict[bytes, KeySettings]:
        return dict(_parse(line, self._tiers) for line in lines)

    def _look(self) -> None:
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if not self._watch.has_changed():
            return
        try:
            self._keys = self._fixed | self._parsed(read_secret_file(self._file))
        except ConfigError as error:
            _LOGGER.error("the API keys stay unchanged: %s", error)
            return
        _LOGGER.warning("%s has changed: %d API keys are accepted", self._file, len(self._keys))


def _parse(line: str, tiers: Sequence[str] | None) -> tuple[bytes, KeySettings]:
    """Returns the digest of a line's key, and its settings. Error messages never show the key."""
    key, settings = split_key(line)
    values = dict(settings)
    if len(values) < len(settings) or values.keys() - set(_SETTINGS):
        raise ConfigError(
            f"API keys: {', '.join(f'{name}=' for name, _ in settings)} after a key is not "
            f"valid: the only settings are {', '.join(_SETTINGS.values())}, each given once."
        )
    own = KeySettings(
        min_priority=_min_priority(values.get("min_priority")),
        tiers=_tiers(values.get("tier"), tiers),
        tenant=_tenant(values.get("tenant")),
        may_tighten=_may_tighten(values.get("tighten")),
    )
    return hashlib.sha256(key.encode()).digest(), own


def _min_priority(text: str | None) -> int | None:
    if text is None:
        return None
    low, high = RANGES["server.key_min_priority"]
    if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
        raise ConfigError(
            f"API keys: min_priority of a key must be an integer in [{low}, {high}], got "
            f"{text[:40]!r}."
        )
    return int(text)


def _tiers(text: str | None, known: Sequence[str] | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(text.split(","))
    for name in names:
        if known is not None and name not in known:
            tiers = f"one of {', '.join(known)}" if known else "left out: scheduler.tiers is empty"
            raise ConfigError(f"API keys: tier of a key must be {tiers}; got {name[:40]!r}.")
    if len(set(names)) < len(names):
        raise ConfigError(f"API keys: tier of a key names a tier twice: {text[:80]!r}.")
    return names


def _tenant(text: str | None) -> str | None:
    if text is not None and not _TENANT.fullmatch(text):
        raise ConfigError(
            "API keys: tenant of a key must have 1 to 64 of the characters A-Z, a-z, 0-9, _, . and "
            f"-, got {text[:80]!r}."
        )
    return text


def _may_tighten(text: str | None) -> bool | None:
    if text not in (None, "yes", "no"):
        raise ConfigError(f"API keys: tighten of a key must be yes or no, got {text[:40]!r}.")
    return None if text is None else text == "yes"


def api_keys(config: ServerConfig, scheduler: SchedulerConfig) -> KeyRing:
    """Returns the keys of clients. Raises ConfigError, also for a key with a tier that does not
    exist."""
    names = [tier.name for tier in scheduler.tiers]
    return KeyRing(config.api_keys, config.api_key_file, names)


# Probes of orchestrators, and the dashboard's pages, which contain no data.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping", *PAGE_FILES})
ADMIN_PREFIX = "/admin"
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # vLLM's names
KEY_IN_SCOPE = "moe_serve.api_key"  # the scope's entry with the digest of the request's key


def is_admin_path(path: str) -> bool:
    """Returns True for the routes that need an admin key."""
    return path.startswith(ADMIN_PREFIX) or path in ADMIN_PATHS


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
        _client.set(self._client_of(scope))  # set for the task of this request
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Returns the reason for a refusal. None: the request is allowed, and the scope has its
        key's digest."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return None
        given = _given_key(Headers(scope=scope))
        if is_admin_path(scope["path"]):
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
    """Returns the owner of a request's data: the digest of its key, or "" if the server has no
    keys."""
    digest: bytes | None = request.scope.get(KEY_IN_SCOPE)
    return "" if digest is None else digest.hex()


def current_client() -> Client:
    """Returns the client of the request that the current task serves."""
    return _client.get()


def _given_key(headers: Headers) -> bytes:
    """Returns the key as OpenAI's or Anthropic's clients send it; empty without a key."""
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
