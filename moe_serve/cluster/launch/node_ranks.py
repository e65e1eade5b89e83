"""The rank processes of one node: node 0 uses them directly, another node through its agent.

The messages between node 0 and the agents are one tagged union each way:

    node 0 to agent    Welcome, StartRank, KillRank, Dismiss
    agent to node 0    NodeHello, NodeAlive, NodeLeaves, RankEnded

No order names a program: an agent starts the worker of its own installation and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from moe_serve.cluster.control.control_message import ControlMessage
from moe_serve.cluster.control.rank_name import RankName, Role
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.processes import LocalProcesses, worker_command
from moe_serve.cluster.members.rank_starter import (
    DEVICES_VARIABLE,
    has_accelerators,
    visible_device,
)
from moe_serve.errors import MoeServeError

STOP_TIMEOUT_S = 5.0


class NodeHello(ControlMessage, frozen=True):
    """The first message of an agent. `host`: its address as node 0 reaches it.

    `joins` is the name of a node that joins a running launch, which gives it a number; it is empty
    for the first nodes. `num_places` is the largest number of ranks that a joining node takes.
    `agent` is a random name that distinguishes it from other agents with the same `joins`.
    """

    node_rank: int
    num_nodes: int
    hostname: str
    host: str
    version: str
    joins: str = ""
    num_places: int = 0
    agent: str = ""


class NodeAlive(ControlMessage, frozen=True):
    """Sent every ALIVE_PERIOD_S."""


class NodeLeaves(ControlMessage, frozen=True):
    """A joined node is about to end, so its cells must be removed."""


class RankEnded(ControlMessage, frozen=True):
    """A rank's process ended without an order. `start`: the number of that process."""

    role: Role
    index: int
    start: int
    why: str


class Welcome(ControlMessage, frozen=True):
    """Node 0 has admitted the agent."""


class StartRank(ControlMessage, frozen=True):
    """Starts a process of a rank, and kills one of the same rank that still runs.

    `place` is the number of ranks before it on its node. `device` is its accelerator; with None the
    one at `place`. With `num_threads` None it gets its share of the node's cores.
    """

    role: Role
    index: int
    start: int
    coordinator_host: str
    coordinator_port: int
    place: int
    num_neighbours: int  # ranks of this node, itself included
    device: int | None = None
    num_threads: int | None = None
    cell: str = ""  # its name, where there are several
    number: int | None = None  # of the rank in its cell; None: `index`

    @property
    def label(self) -> str:
        """The rank's name in the output of this node."""
        name = str(RankName(self.role, self.index if self.number is None else self.number))
        return f"{self.cell}/{name}" if self.cell else name


class KillRank(ControlMessage, frozen=True):
    """Sends SIGKILL to the rank, if it runs."""

    role: Role
    index: int


class Dismiss(ControlMessage, frozen=True):
    """Tells the agent to end all ranks and exit; `why` is None when the launch ended normally."""

    why: str | None = None


AgentOrder = Welcome | StartRank | KillRank | Dismiss
AgentReport = NodeHello | NodeAlive | NodeLeaves | RankEnded

ALIVE_PERIOD_S = 1.0
SILENCE_S = 5.0  # an agent that is silent for this long counts as lost


class NodeRanks:
    """Starts and ends ranks; any thread may call it. `host` is the address where they listen for
    data.

    `command` makes a worker's command line from its options; tests replace it.
    """

    def __init__(
        self,
        host: str,
        secret: ClusterSecret,
        environ: Mapping[str, str],
        command: Callable[..., Sequence[str]] = worker_command,
    ) -> None:
        self._host, self._secret, self._environ = host, secret, environ
        self._command = command
        self._processes = LocalProcesses()
        self._starts: dict[str, StartRank] = {}  # by label
        self._labels: dict[RankName, str] = {}
        self._failed: list[RankEnded] = []

    def start(self, order: StartRank) -> None:
        """Starts a rank. `ended` reports a failure to start: the order may come from far away."""
        name = self._labels[RankName(order.role, order.index)] = order.label
        self._starts[name] = order
        number = order.index if order.number is None else order.number
        coordinator = f"{order.coordinator_host}:{order.coordinator_port}"  # IPv6 without brackets
        try:
            self._processes.kill(name)
            self._processes.start(
                name,
                self._command(
                    "--coordinator", coordinator, "--role", order.role,
                    "--rank", str(number), "--host", self._host,
                ),
                environment=self._environment(order),
                num_threads=order.num_threads or _share_of_cores(order.num_neighbours),
            )  # fmt: skip
        except MoeServeError as error:
            self._failed.append(_ended(order, f"did not start: {error}"))

    def kill(self, order: KillRank) -> None:
        label = self._labels.get(RankName(order.role, order.index))
        if label is not None:
            self._processes.kill(label)

    def ended(self) -> list[RankEnded]:
        """Returns the ranks that ended without an order since the last call."""
        failed, self._failed = self._failed, []
        return failed + [
            _ended(self._starts[item.name], ": ".join([item.reason, *item.tail[-1:]]))
            for item in self._processes.exited()
        ]

    def stop(self) -> None:
        """Sends SIGTERM, then SIGKILL; afterwards none runs."""
        self._processes.stop_all(STOP_TIMEOUT_S)
        self._processes.close()

    def _environment(self, order: StartRank) -> dict[str, str]:
        device = visible_device(
            self._environ, order.place, order.device, has_accelerators=has_accelerators()
        )
        devices = {} if device is None else {DEVICES_VARIABLE: device}
        return {**self._secret.environment(), **devices}


def _ended(order: StartRank, why: str) -> RankEnded:
    return RankEnded(role=order.role, index=order.index, start=order.start, why=why)


def _share_of_cores(num_neighbours: int) -> int:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (num_cores or 1) // max(1, num_neighbours))
