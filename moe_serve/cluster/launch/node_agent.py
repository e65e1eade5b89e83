"""The agent on every node except node 0: starts and ends ranks on the orders of node 0.

Its ranks end with the connection: node 0 has given them up by then, and will ask for new ones. The
agent then looks for node 0 for a while and says hello again. If it does not find node 0, it exits,
and systemd, Kubernetes or Slurm may start it again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from moe_serve import __version__
from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.launch.environment import NodeEnvironment
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_ranks import (
    ALIVE_PERIOD_S,
    AgentOrder,
    AgentReport,
    Dismiss,
    KillRank,
    NodeAlive,
    NodeHello,
    NodeLeaves,
    NodeRanks,
    StartRank,
    Welcome,
)
from moe_serve.errors import ChannelClosedError, ClusterError

_PERIOD_S = 0.05  # between two checks of the ranks
_ATTEMPT_S = 2.0  # one attempt to find node 0 again, between two checks for `stop`
_log = logging.getLogger(__name__)

AgentMessage = AgentOrder | AgentReport


class NodeAgent:
    """One connection to node 0, with the ranks that were started for it."""

    def __init__(
        self, channel: Channel[AgentMessage], ranks: NodeRanks, *, has_joined: bool = False
    ) -> None:
        """`has_joined` means that the node joined a running launch, so it may leave again."""
        self._channel, self._ranks = channel, ranks
        self._may_leave = has_joined
        self._stop_at_s: float | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Runs until dismissed or stopped.

        Raises ClusterError when node 0 refuses us, and ChannelClosedError when it is lost.
        """
        threading.Thread(target=self._beat, name="node-alive", daemon=True).start()
        try:
            while self._stop_at_s is None or time.monotonic() < self._stop_at_s:
                if self._stop_at_s is not None and self._may_leave:
                    self._may_leave = False
                    self._channel.send(NodeLeaves())
                order = self._channel.receive(_PERIOD_S)
                if isinstance(order, Dismiss):
                    if order.why is not None:
                        raise ClusterError(f"node 0 refuses this node: {order.why}")
                    return
                self._obey(order)
                self._report()
        except ChannelClosedError as error:
            if self._stop_at_s is None:
                raise ChannelClosedError(f"node 0 is lost: {error}") from error
        finally:
            self._ranks.stop()
            self._ended.set()
            self._channel.close()

    def stop(self, grace_s: float = 0.0) -> None:
        """Makes `run` end the ranks and return. Safe from a signal handler or another thread.

        A launch is often stopped on all nodes at once. Node 0 then finishes its requests, for which
        it needs our ranks, and dismisses us. The agent waits `grace_s` for that. A second call ends
        it now.
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
            _log.info("node 0 has admitted this node")

    def _kill(self, order: KillRank) -> None:
        try:
            self._ranks.kill(order)
        except ClusterError as error:  # node 0 has closed the rank's connection, so it does no harm
            _log.error("%s", error)

    def _report(self) -> None:
        for ended in self._ranks.ended():
            self._channel.send(ended)

    def _beat(self) -> None:
        """Sends a sign of life on its own thread, so that the node is not lost while a large
        process takes time to end.
        """
        with contextlib.suppress(ChannelClosedError):
            while not self._ended.is_set():
                self._channel.send(NodeAlive())
                self._ended.wait(ALIVE_PERIOD_S)


class NodeLife:
    """Runs a node's agent, and a new agent after each loss of node 0.

    `find` connects to node 0 within the given seconds, or raises ClusterError. `make_ranks` gets
    the address by which node 0 reaches this node.
    """

    def __init__(
        self,
        find: Callable[[float], Channel[AgentMessage]],
        make_ranks: Callable[[str], NodeRanks],
        *,
        start_timeout_s: float,
        rejoin_s: float,
        has_joined: bool = False,
    ) -> None:
        """Connects to node 0; raises ClusterError. `has_joined`: see `NodeAgent`."""
        self._find, self._make_ranks, self._rejoin_s = find, make_ranks, rejoin_s
        self._has_joined = has_joined
        self._is_stopped = False
        self._agent = self._new_agent(find(start_timeout_s))

    def run(self) -> None:
        """Runs until dismissed or stopped; raises ClusterError when node 0 refuses us or is not
        found again in time."""
        while True:
            try:
                self._agent.run()
                return
            except ChannelClosedError as error:
                channel = self._find_again(error)
            if channel is None:
                return
            self._agent = self._new_agent(channel)

    def stop(self, grace_s: float = 0.0) -> None:
        """See `NodeAgent.stop`; while node 0 is lost there is no wait."""
        self._is_stopped = True
        self._agent.stop(grace_s)

    def _new_agent(self, channel: Channel[AgentMessage]) -> NodeAgent:
        ranks = self._make_ranks(channel.local_host)
        agent = NodeAgent(channel, ranks, has_joined=self._has_joined)
        if self._is_stopped:
            agent.stop()
        return agent

    def _find_again(self, loss: ChannelClosedError) -> Channel[AgentMessage] | None:
        """Connects to node 0 again; returns None when stopped meanwhile."""
        deadline = time.monotonic() + self._rejoin_s
        _log.warning("%s Its ranks on this node have ended; looking for node 0", loss)
        while not self._is_stopped:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ClusterError(
                    f"{loss} It was not found again in {self._rejoin_s:g} s (cluster.rejoin_s)."
                ) from loss
            try:
                return self._find(min(_ATTEMPT_S, remaining_s))
            except ClusterError as error:
                _log.debug("%s", error)
                time.sleep(_PERIOD_S)  # if the connection is refused at once
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningNode:
    """A node that joins a running launch. `agent` is a random name; see `NodeHello`."""

    name: str
    num_places: int
    coordinator: HostPort
    agent: str


def connect_joining(
    node: JoiningNode, hostname: str, secret: ClusterSecret, timeout_s: float
) -> Channel[AgentMessage]:
    """Connects to node 0 of a running launch, as `connect_agent` does; raises ClusterError."""
    hint = "Was that launch started with --cells, --coordinator and a secret?"
    channel = _connect(node.coordinator, f"node {node.name}", hint, secret, timeout_s)
    channel.send(
        NodeHello(
            node_rank=0,
            num_nodes=0,
            hostname=hostname,
            host=channel.local_host,
            version=__version__,
            joins=node.name,
            num_places=node.num_places,
            agent=node.agent,
        )
    )
    return channel


def connect_agent(
    node: NodeEnvironment, hostname: str, secret: ClusterSecret, timeout_s: float
) -> Channel[AgentMessage]:
    """Connects to node 0, retrying until `timeout_s`, and says which node this is; raises
    ClusterError."""
    hint = "Does the same command run there, and does a firewall let this port through?"
    channel = _connect(node.coordinator, f"node {node.node_rank}", hint, secret, timeout_s)
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


def _connect(
    at: HostPort, name: str, hint: str, secret: ClusterSecret, timeout_s: float
) -> Channel[AgentMessage]:
    decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentOrder)
    try:
        return connect(at.host, at.port, secret, decoder, timeout_s)
    except ClusterError as error:
        raise ClusterError(f"{name} does not find node 0 at {at}: {error} {hint}") from error
