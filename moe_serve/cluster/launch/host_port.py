"""HOST:PORT as in flags and files, an IPv6 address in brackets; and the address of this node."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HostPort:
    """The address on which the coordinator listens, as other nodes reach it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, source: str) -> HostPort:
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
    return HostPort(host, parse_port(port, source))


def parse_port(text: str, source: str) -> int:
    is_number = text.isascii() and text.isdigit()
    if not is_number or not 1 <= int(text) <= 65535:
        raise ConfigError(f"{text!r} ({source}) is not a port: give an integer in [1, 65535].")
    return int(text)


def resolve(host: str) -> list[str]:
    """Returns the addresses of a name, the preferred one first."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_address(
    host: str, num_nodes: int, resolve_name: Callable[[str], list[str]] = resolve
) -> str:
    """Returns an address of the coordinator's name that other nodes can reach; raises
    ConfigError.

    Many systems give their own name a loopback address in /etc/hosts, on which other nodes could
    not find the coordinator.
    """
    try:
        addresses = resolve_name(host)
    except OSError as error:
        raise ConfigError(
            f"the coordinator's host {host} has no address here: {error.strerror or error}; give "
            "node 0's address: --coordinator ADDRESS:PORT."
        ) from error
    if num_nodes == 1:
        return addresses[0]
    open_ones = [address for address in addresses if not _is_loopback(address)]
    if not open_ones:
        raise ConfigError(
            f"the coordinator's host {host} is {addresses[0]} on this node, which the other "
            f"{num_nodes - 1} cannot reach; give node 0's address: --coordinator ADDRESS:PORT."
        )
    return open_ones[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
