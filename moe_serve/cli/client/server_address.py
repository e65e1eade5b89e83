"""The address of a server and the headers of each request to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from moe_serve.errors import ConfigError

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class ServerAddress:
    url: httpx.URL  # without /v1
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> ServerAddress:
        """Parses a URL with or without /v1. Raises ConfigError."""
        try:
            parsed = parse_url(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url} is not a URL: {error}.") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url} is not a URL such as http://127.0.0.1:8000.")
        # A secret made by `echo` ends with a line break. httpx would refuse it with a message
        # that shows the whole key.
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the API key holds a character that cannot be sent, such as a line break at the "
                "end."
            )
        return cls(parsed, {} if api_key is None else {"Authorization": f"Bearer {api_key}"})

    @property
    def uses_proxies(self) -> bool:
        """Whether the environment's proxies apply: never for a server on this machine."""
        return self.url.host not in _LOOPBACK_HOSTS


def parse_url(text: str) -> httpx.URL:
    """Parses a URL and removes /v1.

    Raises httpx.InvalidURL, also for an invalid host name such as 127..0.1: httpx itself notices
    that only when it connects, and then raises UnicodeError.
    """
    url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    try:
        url.host.encode("idna")
    except UnicodeError:
        raise httpx.InvalidURL(f"{url.host} is not a host name") from None
    return url
