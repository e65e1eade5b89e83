"""Gives the commands that start the ranks of a cell, for operators or a job system that start
them.
"""

from __future__ import annotations

import logging
import shlex

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.processes import WORKER_MODULE
from moe_serve.cluster.members.rank_starter import RankExit

_log = logging.getLogger(__name__)


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
