"""HOST:PORT as in flags and files; an IPv6 address is in brackets."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address on which the coordinator listens, as other nodes reach it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, source: str) -> Endpoint:
    """Parses HOST:PORT; raises ConfigError, whose message names `source`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or any(character.isspace() for character in host):
        raise ConfigError(
            f"{text!r} ({source}) is not HOST:PORT, such as 10.0.0.1:29600 or [fd00::1]:29600."
        )
    return Endpoint(host, parse_port(port, source))


def parse_port(text: str, source: str) -> int:
    is_number = text.isascii() and text.isdigit()
    if not is_number or not 1 <= int(text) <= 65535:
        raise ConfigError(f"{text!r} ({source}) is not a port: give an integer in [1, 65535].")
    return int(text)
