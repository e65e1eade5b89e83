"""A command that a template process forks, and the messages between both.

An import of torch and of the server takes about two seconds of a core, and the suite starts some
hundred servers and ranks. A fork of a process that has imported them takes some milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

_LENGTH_BYTES = 4
_MAX_FDS = 64
# Variables that no import reads; a copy must have the template's values of all others.
_MAY_DIFFER = (
    "MOE_SERVE_", "ONEDNN_MAX_CPU_ISA", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED", "RUST_",
    "TOKENIZERS_PARALLELISM",
)  # fmt: skip
WORKERS = (
    "moe_serve.cluster.ranks.rank_worker",
    "moe_serve.cluster.ranks.attention_shard",
    "moe_serve.planning.exchange_timing",
)
WITHOUT_STDOUT = "tests.support.forks.without_stdout"
_IN_NAMESPACE = ("ip", "netns", "exec")
_PROGRAMS = (
    *WORKERS,
    "moe_serve",
    "pingpong.rank",
    "gpu_bench.worker",
    "trace_chat",
    "tests.support.forks.script",
    "tests.support.engine.disk_writer",
    "tests.support.engine.draw_faults",
    "tests.support.http.serve_fake",
    "tests.support.kernels.loaded_on_cpu",
    WITHOUT_STDOUT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A Python command, its environment and folder, and the numbers of its file descriptors."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    fds: tuple[int, ...]  # the first three are its standard streams
    new_session: bool
    parent: int
    namespace: str  # of the network; empty for that of the template


@dataclass(frozen=True, slots=True)
class Program:
    """A module that runs as the main program."""

    module: str
    arguments: tuple[str, ...]
    safe_path: bool  # without the working folder on the path


def network_of(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Returns the network namespace that `ip` runs the command in, or "", and the command."""
    if tuple(argv[:3]) == _IN_NAMESPACE and len(argv) > 3:
        return argv[3], argv[4:]
    return "", argv


def program_of(argv: Sequence[str]) -> Program | None:
    """Returns the module that the command runs, or None if a template cannot run it."""
    if not argv or argv[0] != sys.executable:
        return None
    rest = list(argv[1:])
    safe = rest[:1] == ["-P"]
    if safe:
        rest.pop(0)
    if len(rest) < 2 or rest[0] != "-m" or rest[1] not in _PROGRAMS:
        return None
    return Program(rest[1], tuple(rest[2:]), safe)


def fixed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a copy must have in common with its template."""
    return {name: value for name, value in environment.items() if not name.startswith(_MAY_DIFFER)}


def send(connection: socket.socket, order: Order, descriptors: Sequence[int]) -> None:
    content = json.dumps(asdict(order)).encode("utf-8", "surrogateescape")
    head = len(content).to_bytes(_LENGTH_BYTES, "big")
    socket.send_fds(connection, [head], list(descriptors))
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[Order, list[int]] | None:
    """Returns the next order and its descriptors, or None if the other side has ended."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MAX_FDS)
    if not head:
        return None
    rest = int.from_bytes(head, "big")
    content = b""
    while len(content) < rest:
        piece = connection.recv(rest - len(content))
        if not piece:
            return None
        content += piece
    found = json.loads(content)
    found["argv"], found["fds"] = tuple(found["argv"]), tuple(found["fds"])
    return Order(**found), descriptors


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
