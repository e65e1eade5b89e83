"""Finds the address on which node 0 listens for the other nodes."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from moe_serve.errors import ConfigError


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
