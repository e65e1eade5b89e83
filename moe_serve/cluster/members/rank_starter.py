"""Starts, watches and kills the processes of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.devices import (
    DEVICES_VARIABLE,
    num_accelerators,
    shared_device,
)
from moe_serve.cluster.members.processes import LocalProcesses, worker_command

STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RankExit:
    """The end of a rank's process: the reason, with its last lines."""

    name: str
    why: str


class RankStarter(Protocol):
    """Starts rank processes on this host, or through the agents of many. Any thread may call it."""

    def start(self, rank: RankName) -> None:
        """Starts a rank's process; raises ClusterError."""
        ...

    def place_of(self, rank: RankName) -> str:
        """Returns the node of a rank, in words for the user."""
        ...

    def kill(self, rank: RankName) -> None:
        """Makes sure that the process does not run any more, even if it is frozen."""
        ...

    def exited(self) -> list[RankExit]:
        """Returns the ranks whose processes ended since the last call."""
        ...

    def stop(self) -> None:
        """Ends all processes; kills those that do not end in time."""
        ...


class LocalStarter:
    """Implements RankStarter on this host."""

    def __init__(self, host: str, port: int, secret: ClusterSecret, num_threads: int) -> None:
        self._host, self._port, self._secret = host, port, secret
        self._num_threads = num_threads
        self._processes = LocalProcesses()
        self._places: dict[str, int] = {}  # indices in the order of first starts

    def start(self, rank: RankName) -> None:
        command = worker_command(
            "--coordinator", f"{self._host}:{self._port}",
            "--role", rank.role, "--rank", str(rank.index), "--host", self._host,
        )  # fmt: skip
        self._processes.start(
            str(rank),
            command,
            environment={**self._secret.environment(), **self._devices(rank)},
            num_threads=self._num_threads,
        )

    def _devices(self, rank: RankName) -> dict[str, str]:
        """Gives rank i the GPU i, modulo the GPUs of this host."""
        place = self._places.setdefault(str(rank), len(self._places))
        device = shared_device(os.environ, place, num_accelerators())
        return {} if device is None else {DEVICES_VARIABLE: device}

    def place_of(self, rank: RankName) -> str:
        return "this host"

    def pid(self, rank: RankName) -> int | None:
        """Returns the pid of the rank's process while it runs."""
        return self._processes.pid(str(rank))

    def stacks(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Returns the stacks that loaded ranks write about their threads."""
        return self._processes.stacks(names)

    def kill(self, rank: RankName) -> None:
        self._processes.kill(str(rank))

    def exited(self) -> list[RankExit]:
        return [
            RankExit(item.name, ": ".join([item.reason, *item.tail[-1:]]))
            for item in self._processes.exited()
        ]

    def stop(self) -> None:
        self._processes.stop_all(STOP_TIMEOUT_S)
        self._processes.close()
