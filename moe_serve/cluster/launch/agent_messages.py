"""The messages between node 0 and the agents of the other nodes: one tagged union each way.

Node 0 to agent: Welcome, StartRank, KillRank, Dismiss.
Agent to node 0: NodeHello, NodeAlive, RankEnded.

No order names a program: an agent starts the worker of its own installation and nothing else.
"""

from __future__ import annotations

from moe_serve.cluster.control.messages import ControlMessage
from moe_serve.cluster.control.rank_name import Role


class NodeHello(ControlMessage, frozen=True):
    """The first message of an agent. `host`: its address as node 0 reaches it."""

    node_rank: int
    num_nodes: int
    hostname: str
    host: str
    version: str


class NodeAlive(ControlMessage, frozen=True):
    """Sent every ALIVE_PERIOD_S."""


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

    `place`: the number of ranks before it on its node. `device`: its accelerator; None: the one at
    `place`. `num_threads` None: its share of the node's cores.
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


class KillRank(ControlMessage, frozen=True):
    """Sends SIGKILL to the rank, if it runs."""

    role: Role
    index: int


class Dismiss(ControlMessage, frozen=True):
    """Tells the agent to end all ranks and exit; `why` is None when the launch ended normally."""

    why: str | None = None


AgentOrder = Welcome | StartRank | KillRank | Dismiss
AgentReport = NodeHello | NodeAlive | RankEnded

ALIVE_PERIOD_S = 1.0
SILENCE_S = 5.0  # an agent that is silent for this long has lost its node
