"""What runs on every node but node 0: starts and ends the ranks that node 0 tells it to.

It ends with the connection: without node 0 nobody serves, and whoever started the agent (systemd,
Kubernetes, Slurm) starts it again, whereupon it says hello again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import msgspec

from moe_serve import __version__
from moe_serve.cluster.channel import Channel, connect
from moe_serve.cluster.launch.agent_messages import (
    ALIVE_PERIOD_S,
    AgentOrder,
    AgentReport,
    Dismiss,
    KillRank,
    NodeAlive,
    NodeHello,
    StartRank,
    Welcome,
)
from moe_serve.cluster.launch.environment import NodeEnvironment
from moe_serve.cluster.launch.node_ranks import NodeRanks
from moe_serve.cluster.secret import ClusterSecret
from moe_serve.errors import ChannelClosedError, ClusterError

_PERIOD_S = 0.05  # how often ranks are looked after
_log = logging.getLogger(__name__)

AgentMessage = AgentOrder | AgentReport


class NodeAgent:
    """One connection to node 0 and the ranks that were started for it."""

    def __init__(self, channel: Channel[AgentMessage], ranks: NodeRanks) -> None:
        self._channel, self._ranks = channel, ranks
        self._stop_at_s: float | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Until dismissed or stopped; raises ClusterError when node 0 is lost or refuses us."""
        threading.Thread(target=self._beat, name="node-alive", daemon=True).start()
        try:
            while self._stop_at_s is None or time.monotonic() < self._stop_at_s:
                order = self._channel.receive(_PERIOD_S)
                if isinstance(order, Dismiss):
                    if order.why is not None:
                        raise ClusterError(f"node 0 refuses this node: {order.why}")
                    return
                self._obey(order)
                self._report()
        except ChannelClosedError as error:
            raise ClusterError(f"node 0 is lost: {error}") from error
        finally:
            self._ranks.stop()
            self._ended.set()
            self._channel.close()

    def stop(self, grace_s: float = 0.0) -> None:
        """From a signal handler or another thread: `run` ends the ranks and returns.

        Whoever stops a launch often tells all nodes at once. Node 0 then finishes its requests, for
        which it needs our ranks, and dismisses us: that is waited for. A second call ends it.
        """
        is_second = self._stop_at_s is not None
        self._stop_at_s = time.monotonic() + (0.0 if is_second else grace_s)

    def _obey(self, order: AgentMessage | None) -> None:
        if isinstance(order, StartRank):
            _log.info("starting %s-%d", order.role, order.index)
            self._ranks.start(order)
        elif isinstance(order, KillRank):
            self._kill(order)
        elif isinstance(order, Welcome):
            _log.info("node 0 has taken this node in")

    def _kill(self, order: KillRank) -> None:
        try:
            self._ranks.kill(order)
        except ClusterError as error:  # node 0 has closed its connection: it can do no harm
            _log.error("%s", error)

    def _report(self) -> None:
        for ended in self._ranks.ended():
            self._channel.send(ended)

    def _beat(self) -> None:
        """On a thread of its own: a process that holds much memory takes its time to end, and the
        node is not lost meanwhile."""
        with contextlib.suppress(ChannelClosedError):
            while not self._ended.is_set():
                self._channel.send(NodeAlive())
                self._ended.wait(ALIVE_PERIOD_S)


def connect_agent(
    node: NodeEnvironment, hostname: str, secret: ClusterSecret, timeout_s: float
) -> Channel[AgentMessage]:
    """Find node 0, trying until `timeout_s`, and say which node this is; raises ClusterError."""
    decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentOrder)
    try:
        channel = connect(node.coordinator_host, node.coordinator_port, secret, decoder, timeout_s)
    except ClusterError as error:
        raise ClusterError(
            f"node {node.node_rank} does not find node 0 at {node.coordinator}: {error} Does the "
            "same command run there, and does a firewall let this port through?"
        ) from error
    channel.send(
        NodeHello(
            node_rank=node.node_rank,
            num_nodes=node.num_nodes,
            hostname=hostname,
            host=channel.local_host,
            version=__version__,
        )
    )
    return channel
