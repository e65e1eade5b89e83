"""Reads DeepSpeed's list of hosts: `host slots=n` on each line, `#` starts a comment.

Nodes are in the order of the file; slots are the most ranks that a host may get.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

_LINE = re.compile(r"(?P<host>[^\s#=]+)(?:\s+slots\s*=\s*(?P<slots>\d+))?")


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
