"""Limits for each API key: concurrent sequences, requests per minute, tokens per minute.

A request counts as one sequence from its start to its end. Every further choice or prompt counts as
one more: `n = 4` counts as four.

The allowance of a minute may be used at once and refills evenly. Tokens are known only when an
answer has ended, so they are charged then: a key with a negative balance starts nothing new until
the balance is positive again. Without API keys all clients share one account.
"""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import InvalidRequestError
from moe_serve.http.gate.auth import KEY_IN_SCOPE, is_admin_path
from moe_serve.http.schema.api_error import ApiError, retry_headers

_CONCURRENT_RETRY_S = 1.0

KeyRefusal = Literal["key_concurrent", "key_requests", "key_tokens"]
_current: contextvars.ContextVar[KeyAccount | None] = contextvars.ContextVar("key", default=None)


class Allowance:
    """An allowance per minute, refilled evenly. `left` may be below 0."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._left, self._at = per_minute, float(per_minute), now

    def spend(self, amount: float, now: float) -> None:
        self._left = self.left(now) - amount
        self._at = now

    def left(self, now: float) -> float:
        gained = (now - self._at) * self._per_minute / 60
        return min(float(self._per_minute), self._left + gained)

    def seconds_until(self, amount: float, now: float) -> float:
        """Returns the time until `amount` is available; 0 if it already is."""
        return max(0.0, (amount - self.left(now)) * 60 / self._per_minute)


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a key may not start a request now, and the time until it may."""

    reason: KeyRefusal
    message: str
    retry_after_s: float

    def error(self) -> ApiError:
        headers = {**retry_headers(self.retry_after_s), "x-should-retry": "true"}
        message = f"{self.message}. Try again in {math.ceil(self.retry_after_s)} s."
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


class KeyAccount:
    """The usage of one key. It is used on the event loop's thread only."""

    def __init__(self, config: ServerConfig, now: float) -> None:
        requests, tokens = config.key_requests_per_minute, config.key_tokens_per_minute
        self._config, self._num_open = config, 0
        self._requests = None if requests is None else Allowance(requests, now)
        self._tokens = None if tokens is None else Allowance(tokens, now)

    def begin(self, now: float) -> Refused | None:
        """Starts a request, which counts as open until `end`; or returns why it is refused."""
        refused = self._refusal(now)
        if refused is None:
            self._num_open += 1
            if self._requests is not None:
                self._requests.spend(1, now)
        return refused

    def hold(self) -> None:
        """Counts work that continues after its request, such as a background response, until
        `end`."""
        self._num_open += 1

    def end(self) -> None:
        self._num_open -= 1

    def claim(self, num_sequences: int) -> Refused | None:
        """Counts all sequences of an open request until `release`; or returns why it is refused.

        Raises InvalidRequestError if the request exceeds the key's limit by itself.
        """
        most, more = self._config.key_max_concurrent, num_sequences - 1
        if most is not None and num_sequences > most:
            raise InvalidRequestError(
                f"This request has {num_sequences} sequences (prompts times n), but this API key "
                f"may have at most {most} at once (server.key_max_concurrent). Send fewer.",
                param="n",
            )
        if most is not None and self._num_open + more > most:
            return self._crowded(most, num_sequences)
        self._num_open += more
        return None

    def release(self, num_sequences: int) -> None:
        """Ends the count of `claim`. The request itself counts until `end`."""
        self._num_open -= num_sequences - 1

    def charge(self, num_tokens: int, now: float) -> None:
        """Charges the tokens of a finished answer and its prompt."""
        if self._tokens is not None:
            self._tokens.spend(num_tokens, now)

    def _refusal(self, now: float) -> Refused | None:
        most = self._config.key_max_concurrent
        if most is not None and self._num_open >= most:
            return self._crowded(most, 1)
        if self._requests is not None and (wait := self._requests.seconds_until(1, now)):
            most = self._config.key_requests_per_minute
            message = f"This API key has used its {most} requests per minute"
            return Refused("key_requests", message, wait)
        if self._tokens is not None and (wait := self._tokens.seconds_until(1, now)):
            most = self._config.key_tokens_per_minute
            return Refused(
                "key_tokens", f"This API key has used its {most} tokens per minute", wait
            )
        return None

    def _crowded(self, most: int, num_wanted: int) -> Refused:
        others = self._num_open - (num_wanted > 1)  # without the request itself
        message = (
            f"This API key has {others} sequences open and requests {num_wanted} more; its limit "
            f"is {most}"
        )
        return Refused("key_concurrent", message, _CONCURRENT_RETRY_S)


def current_account() -> KeyAccount | None:
    """Returns the account of the request that the current task serves; None: there are no limits.

    It lets a generation charge the account without depending on HTTP.
    """
    return _current.get()


class KeyLimitMiddleware:
    """Applies the limits to POST requests outside /admin. `count` is called for each refusal."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, count: Callable[[KeyRefusal], None]
    ) -> None:
        self._app, self._config, self._count = app, config, count
        limits = (
            config.key_max_concurrent,
            config.key_requests_per_minute,
            config.key_tokens_per_minute,
        )
        self._is_on = any(limit is not None for limit in limits)
        self._accounts: dict[bytes | None, KeyAccount] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (self._is_on and _is_limited(scope)):
            await self._app(scope, receive, send)
            return
        now, key = time.monotonic(), scope.get(KEY_IN_SCOPE)
        account = self._accounts.setdefault(key, KeyAccount(self._config, now))
        refused = account.begin(now)
        if refused is not None:
            self._count(refused.reason)
            await refused.error().response(scope["path"])(scope, receive, send)
            return
        token = _current.set(account)
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)
            account.end()


def _is_limited(scope: Scope) -> bool:
    """Returns True if limits apply. Cancelling is always allowed, as it frees capacity; /admin has
    own keys."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path = str(scope["path"])
    return not (is_admin_path(path) or path.endswith("/cancel"))
