"""Reads addresses of hosts: HOST:PORT, DeepSpeed's hostfile, and the compressed lists of Slurm.

An IPv6 address in HOST:PORT is in brackets. A hostfile has `host slots=n` on each line, and `#`
starts a comment. Nodes are in the order of the file; slots are the most ranks that a host may get.
Slurm's `node[01-03,7],login` is node01 node02 node03 node7 login. It is expanded here because
`scontrol show hostnames` is missing in some containers.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

_LINE = re.compile(r"(?P<host>[^\s#=]+)(?:\s+slots\s*=\s*(?P<slots>\d+))?")
MAX_HOSTS = 65536
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host. `name` is any name that ssh takes: a name, an address, user@host, or an alias."""

    name: str
    slots: int | None  # None: not stated

    @property
    def address(self) -> str:
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    try:
        return parse_hostfile(regular_file(path).read_text("utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the hostfile {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the hostfile {path} is not UTF-8 text.") from error


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """Parses a hostfile; raises ConfigError with the line."""
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        stated = line.partition("#")[0].strip()
        if not stated:
            continue
        match = _LINE.fullmatch(stated)
        place = f"{source}:{number}"
        # A name that starts with a dash would be an option of ssh.
        if match is None or match["host"].startswith("-"):
            raise ConfigError(
                f"{stated!r} ({place}) is not a hostfile line, such as: host slots=4."
            )
        if match["host"] in {host.name for host in hosts}:
            raise ConfigError(f"{match['host']} is in the hostfile twice ({place}); keep one.")
        slots = None if match["slots"] is None else int(match["slots"])
        if slots == 0:
            raise ConfigError(f"{match['host']} has no slots ({place}); leave the line out.")
        hosts.append(Host(name=match["host"], slots=slots))
    if not hosts:
        raise ConfigError(f"the hostfile {source} names no host.")
    return tuple(hosts)


def check_slots(hosts: tuple[Host, ...], num_ranks_of_node: list[int]) -> None:
    """Raises ConfigError unless every host has a slot for each of its ranks."""
    for host, num_ranks in zip(hosts, num_ranks_of_node, strict=True):
        if host.slots is not None and num_ranks > host.slots:
            raise ConfigError(
                f"{host.name} would get {num_ranks} ranks and has {host.slots} slots; use fewer "
                "ranks, or more hosts."
            )


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Returns every host in order; raises ConfigError.

    Numbers keep the width of the first: [08-10] is 08 09 10, and [8-10] is 8 9 10. Several brackets
    in one name are multiplied, the last one running fastest: r[1-2]n[1-2] is r1n1 r1n2 r2n1 r2n2.
    """
    hosts: list[str] = []
    for name in _names(text):
        hosts += _expand(name, text)
        if len(hosts) > MAX_HOSTS:
            raise _wrong(text, f"it names more than {MAX_HOSTS} hosts")
    if not hosts:
        raise _wrong(text, "it is empty")
    return tuple(hosts)


def _names(text: str) -> Iterator[str]:
    """Splits the list at the commas outside brackets."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _wrong(text, f"a bracket at position {index} does not match")
        if character == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise _wrong(text, "a bracket is not closed")
    if text:
        yield text[start:]


def _expand(name: str, text: str) -> list[str]:
    hosts = [""]
    name = name.strip()
    if not name or any(character.isspace() for character in name):
        raise _wrong(text, "a host name is empty or has spaces")
    for match in _PIECE.finditer(name):
        endings = [match[2]] if match[1] is None else _numbers(match[1], text)
        if len(hosts) * len(endings) > MAX_HOSTS:
            raise _wrong(text, f"it names more than {MAX_HOSTS} hosts")
        hosts = [host + ending for host in hosts for ending in endings]
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = _NUMBERS.fullmatch(part.strip())
        if match is None:
            raise _wrong(text, f"[{ranges}] is not a list of numbers and ranges")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise _wrong(text, f"the range {part} runs backwards or is too long")
        width = len(first)
        found += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str, reason: str) -> ConfigError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ConfigError(f"the host list {shown!r} cannot be read: {reason}.")
