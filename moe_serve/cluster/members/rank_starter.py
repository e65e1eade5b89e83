"""Starts, watches and kills the processes of ranks, and chooses the accelerator of each.

Operators or a job system may start ranks instead; they get the commands.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.processes import WORKER_MODULE, LocalProcesses, worker_command
from moe_serve.errors import ConfigError

STOP_TIMEOUT_S = 5.0
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/dev/nvidiactl")

_log = logging.getLogger(__name__)


def visible_device(
    environ: Mapping[str, str], place: int, device: int | None, *, has_accelerators: bool
) -> str | None:
    """Returns the value of CUDA_VISIBLE_DEVICES for one rank; None leaves the variable as it is.

    A launcher may have narrowed what the node sees (Slurm: CUDA_VISIBLE_DEVICES=4,5). Then `device`
    and `place` are indices into that list. Raises ConfigError.
    """
    wanted = place if device is None else device
    given = environ.get(DEVICES_VARIABLE)
    if given is None:
        return str(wanted) if has_accelerators or device is not None else None
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names and device is None:
        return None  # hidden on purpose
    if wanted >= len(names):
        raise ConfigError(
            f"a rank needs device {wanted} of its node, but {DEVICES_VARIABLE}={given} "
            f"lists only {len(names)} devices."
        )
    return names[wanted]


def shared_device(environ: Mapping[str, str], place: int, num_devices: int) -> str | None:
    """Does the same as `visible_device` for ranks of one host that take its devices in turn and may
    share them.
    """
    given = environ.get(DEVICES_VARIABLE)
    names = [str(number) for number in range(num_devices)]
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
    return names[place % len(names)] if names else None


def num_accelerators() -> int:
    """Returns the number of NVIDIA GPUs of this host or container, without loading a library."""
    return sum(path.name[len("nvidia") :].isdigit() for path in _DRIVER.parent.glob("nvidia*"))


def has_accelerators() -> bool:
    """Returns True if the NVIDIA driver is loaded. Asking a library would take seconds."""
    return _DRIVER.exists()


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
        """Returns words that tell the user on which node a rank runs."""
        ...

    def kill(self, rank: RankName) -> None:
        """Ends the process for certain, even if it is frozen."""
        ...

    def exited(self) -> list[RankExit]:
        """Returns the ranks whose processes ended since the last call."""
        ...

    def stop(self) -> None:
        """Ends all processes, and kills those that do not end in time."""
        ...


class LocalStarter:
    """Implements RankStarter on this host."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: ClusterSecret,
        num_threads: int,
        *,
        cell: str = "",
        first_place: int = 0,
    ) -> None:
        """`cell` is its name if there are several. `first_place` is the number of ranks that other
        cells have on this host.
        """
        self._host, self._port, self._secret = host, port, secret
        self._num_threads, self._first_place = num_threads, first_place
        self._prefix = f"{cell}/" if cell else ""  # of the names of processes
        self._processes = LocalProcesses()
        self._places: dict[str, int] = {}  # indices in the order of first starts

    def start(self, rank: RankName) -> None:
        command = worker_command(
            "--coordinator", f"{self._host}:{self._port}",
            "--role", rank.role, "--rank", str(rank.index), "--host", self._host,
        )  # fmt: skip
        self._processes.start(
            f"{self._prefix}{rank}",
            command,
            environment={**self._secret.environment(), **self._devices(rank)},
            num_threads=self._num_threads,
        )

    def _devices(self, rank: RankName) -> dict[str, str]:
        """Returns GPU i for rank i, modulo the GPUs of this host."""
        place = self._places.setdefault(str(rank), self._first_place + len(self._places))
        device = shared_device(os.environ, place, num_accelerators())
        return {} if device is None else {DEVICES_VARIABLE: device}

    def place_of(self, rank: RankName) -> str:
        return "this host"

    def pid(self, rank: RankName) -> int | None:
        """Returns the pid of the rank's process while it runs."""
        return self._processes.pid(f"{self._prefix}{rank}")

    def stacks(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Returns the stacks that loaded ranks write about their threads."""
        found = self._processes.stacks(f"{self._prefix}{name}" for name in names)
        return {name.removeprefix(self._prefix): tail for name, tail in found.items()}

    def kill(self, rank: RankName) -> None:
        self._processes.kill(f"{self._prefix}{rank}")

    def exited(self) -> list[RankExit]:
        return [
            RankExit(
                item.name.removeprefix(self._prefix), ": ".join([item.reason, *item.tail[-1:]])
            )
            for item in self._processes.exited()
        ]

    def stop(self) -> None:
        self._processes.stop_all(STOP_TIMEOUT_S)
        self._processes.close()


class HandStarter:
    """Implements RankStarter without starting anything. A rank joins by connecting. A rank that is
    given up loses its connection and ends; its process must be started again by hand.
    """

    def __init__(self, cell: str, host: str, port: int, num_threads: int) -> None:
        self._cell, self._host, self._port, self._num_threads = cell, host, port, num_threads

    def command(self, rank: RankName) -> str:
        """Returns the command for a rank. HOST stands for the address of the host that runs it; the
        cluster's secret is expected in its environment."""
        is_here = self._host.startswith("127.") or self._host in ("localhost", "::1")
        arguments = (
            "python", "-m", WORKER_MODULE, "--coordinator", f"{self._host}:{self._port}",
            "--role", rank.role, "--rank", str(rank.index),
            "--host", self._host if is_here else "HOST",
        )  # fmt: skip
        return f"OMP_NUM_THREADS={self._num_threads} {shlex.join(arguments)}"

    def start(self, rank: RankName) -> None:
        """See `RankStarter.start`."""
        _log.info("start %s/%s by hand: %s", self._cell, rank, self.command(rank))

    def place_of(self, rank: RankName) -> str:
        """See `RankStarter.place_of`."""
        return "the host on which its command is run"

    def kill(self, rank: RankName) -> None:
        """Does nothing: the rank ends with its connection."""

    def exited(self) -> list[RankExit]:
        """See `RankStarter.exited`. The end of a connection tells the end of its rank."""
        return []

    def stop(self) -> None:
        """Does nothing: ranks end when they are told to, or with their connection."""
