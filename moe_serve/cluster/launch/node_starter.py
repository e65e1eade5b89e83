"""Starts ranks on many nodes: node 0's own directly, the others' through their agents.

A rank of an absent node is remembered, and started when the node's agent connects.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from moe_serve import __version__
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.listener import Listener
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_agent import AgentMessage
from moe_serve.cluster.launch.node_layout import NodeLayout
from moe_serve.cluster.launch.node_ranks import (
    SILENCE_S,
    AgentOrder,
    AgentReport,
    Dismiss,
    KillRank,
    NodeHello,
    NodeRanks,
    RankEnded,
    StartRank,
    Welcome,
)
from moe_serve.cluster.members.rank_starter import RankExit
from moe_serve.errors import ChannelClosedError, ClusterError


class RemoteNode:
    """Node 0's end of one agent's connection, read on a thread of its own.

    `on_gone` is called once, on that thread, with the reason.
    """

    def __init__(
        self,
        hello: NodeHello,
        channel: Channel[AgentMessage],
        on_ended: Callable[[RankEnded], None],
        on_gone: Callable[[RemoteNode, str], None],
    ) -> None:
        self.hello = hello
        self._channel, self._on_ended, self._on_gone = channel, on_ended, on_gone
        self._thread = threading.Thread(
            target=self._read, name=f"node-{hello.node_rank}", daemon=True
        )

    def watch(self) -> None:
        """Begins to read; until then the agent's reports are not handled."""
        self._thread.start()

    def send(self, order: AgentOrder) -> None:
        """Sends an order. If the agent is gone, `on_gone` reports that."""
        try:
            self._channel.send(order)
        except ChannelClosedError:
            self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        try:
            # Twice half the time: if this host itself was suspended, the second wait finds the
            # messages that arrived meanwhile.
            while True:
                report = self._channel.receive(SILENCE_S / 2)
                if report is None and (report := self._channel.receive(SILENCE_S / 2)) is None:
                    self._on_gone(self, f"silent for {SILENCE_S:g} s")
                    return
                if isinstance(report, RankEnded):
                    self._on_ended(report)
        except ChannelClosedError as error:
            self._on_gone(self, str(error))
        finally:
            self._channel.close()


_HELLO_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CellSeat:
    """The place of a rank in a cell: the cell's name, the rank's number there, and the address of
    the cell's coordinator."""

    cell: str
    number: int
    coordinator: HostPort


class NodeStarter:
    """Implements RankStarter. `devices` holds the ranks with a device given explicitly."""

    def __init__(
        self,
        layout: NodeLayout,
        local: NodeRanks,
        *,
        devices: Mapping[RankName, int] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.layout, self._local = layout, local
        self._devices, self._num_threads = devices or {}, num_threads
        self._coordinator: HostPort | None = None
        self._changed = threading.Condition()  # guards the fields below
        self._nodes: dict[int, RemoteNode] = {}
        self._wanted: dict[str, StartRank] = {}
        self._num_starts: dict[str, int] = {}
        self._ended: list[RankExit] = []
        self._refused: dict[str, str] = {}  # host -> why
        self._removed: set[RankName] = set()  # in the layout, with places to be used again
        self._is_stopped = False
        self._listener: Listener[AgentMessage] | None = None

    def listen(self, at: HostPort, secret: ClusterSecret) -> None:
        """Admits agents from now on; raises ConfigError if the address is not ours."""
        decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentReport)
        self._listener = Listener(at.host, at.port, secret, decoder, self.admit)

    @property
    def port(self) -> int:
        assert self._listener is not None, "`listen` was not called"
        return int(self._listener.port)

    def use_coordinator(self, at: HostPort) -> None:
        """Sets the address to which ranks connect; call it before the first start."""
        self._coordinator = at

    def add(self, ranks: Sequence[RankName]) -> None:
        """Gives further ranks their places on the nodes, those of removed ones first."""
        with self._changed:
            for rank in ranks:
                self.layout = self.layout.with_rank(rank, self._removed)
                self._removed = {old for old in self._removed if self.layout.has(old)}

    def remove(self, ranks: Iterable[RankName]) -> None:
        """Lets the places of ranks that were killed be used again."""
        with self._changed:
            self._removed.update(ranks)

    def wait_for_nodes(self, timeout_s: float) -> None:
        """Waits until every node's agent is there; raises ClusterError with the missing nodes."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := self._missing():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise ClusterError(self._who_is_missing(missing, timeout_s))

    def start(self, rank: RankName, seat: CellSeat | None = None) -> None:
        """See `RankStarter`. `seat`: where there are several cells."""
        at = self._coordinator if seat is None else seat.coordinator
        assert at is not None, "`use_coordinator` was not called"
        node = self.layout.node_of(rank)
        with self._changed:
            number = self._num_starts.get(str(rank), 0) + 1
            self._num_starts[str(rank)] = number
            order = StartRank(
                role=rank.role,
                index=rank.index,
                start=number,
                coordinator_host=at.host,
                coordinator_port=at.port,
                place=self.layout.place_on_node(rank),
                num_neighbours=len(self.layout.nodes[node]),
                device=self._devices.get(rank),
                num_threads=self._num_threads,
                cell="" if seat is None else seat.cell,
                number=None if seat is None else seat.number,
            )
            self._wanted[str(rank)] = order
            remote = self._nodes.get(node)
        if node == 0:
            self._local.start(order)
        elif remote is not None:
            remote.send(order)
        else:
            _log.warning("%s starts when node %d is back", rank, node)

    def place_of(self, rank: RankName) -> str:
        return f"node {self.layout.node_of(rank)}"

    def kill(self, rank: RankName) -> None:
        node = self.layout.node_of(rank)
        order = KillRank(role=rank.role, index=rank.index)
        with self._changed:
            self._wanted.pop(str(rank), None)
            remote = self._nodes.get(node)
        if node == 0:
            self._local.kill(order)
        elif remote is not None:
            remote.send(order)

    def exited(self) -> list[RankExit]:
        for ended in self._local.ended():
            self._note_end(ended)
        with self._changed:
            ended_ranks, self._ended = self._ended, []
        return ended_ranks

    def stop(self) -> None:
        """Dismisses the agents, which end their ranks, and ends our own ranks."""
        with self._changed:
            self._is_stopped = True
            nodes, self._nodes = self._nodes, {}
        if self._listener is not None:
            self._listener.close()
        for node in nodes.values():
            node.send(Dismiss())
        self._local.stop()

    def admit(self, channel: Channel[AgentMessage]) -> None:
        """Admits an authenticated connection if it is the agent of a node of this launch."""
        try:
            hello = channel.receive(_HELLO_S)
            if not isinstance(hello, NodeHello):
                channel.close()
                return
            why = self._objection(hello)
            if why is not None:
                _log.warning("node %d on %s is refused: %s", hello.node_rank, hello.hostname, why)
                with self._changed:
                    self._refused[hello.hostname] = why
                channel.send(Dismiss(why=why))
                channel.close()
                return
            self._take_in(RemoteNode(hello, channel, self._note_end, self._lose))
        except ChannelClosedError as error:
            _log.warning("an agent left before it was admitted: %s", error)

    def _take_in(self, node: RemoteNode) -> None:
        number = node.hello.node_rank
        orders, before = list[StartRank](), None
        with self._changed:
            is_late = self._is_stopped
            if not is_late:
                before = self._nodes.get(number)
                self._nodes[number] = node
                names = {str(rank) for rank in self.layout.nodes[number]}
                orders = [order for name, order in self._wanted.items() if name in names]
        if is_late:  # it connected while we ended, so it is told here
            node.send(Dismiss())
            node.close()
            return
        if before is not None:
            before.close()
        node.send(Welcome())
        for order in orders:
            node.send(order)
        node.watch()
        hello = node.hello
        _log.info("node %d joined: %s at %s", number, hello.hostname, hello.host)
        with self._changed:
            self._changed.notify_all()

    def _lose(self, node: RemoteNode, why: str) -> None:
        number = node.hello.node_rank
        with self._changed:
            if self._is_stopped or self._nodes.get(number) is not node:
                return
            del self._nodes[number]
            reason = f"lost with node {number} ({node.hello.hostname}): {why}"
            self._ended += [RankExit(str(rank), reason) for rank in self.layout.nodes[number]]
        _log.warning("node %d (%s) is lost: %s", number, node.hello.hostname, why)

    def _note_end(self, ended: RankEnded) -> None:
        name = str(RankName(ended.role, ended.index))
        with self._changed:
            wanted = self._wanted.get(name)
            if wanted is not None and wanted.start == ended.start:
                self._ended.append(RankExit(name, ended.why))

    def _objection(self, hello: NodeHello) -> str | None:
        num_nodes = self.layout.num_nodes
        if hello.num_nodes != num_nodes:
            return f"it was started for {hello.num_nodes} nodes, node 0 for {num_nodes}"
        if not 0 < hello.node_rank < num_nodes:
            return (
                f"its number is {hello.node_rank}, but nodes are numbered 0 to "
                f"{num_nodes - 1}, and node 0 is taken"
            )
        if hello.version != __version__:
            return f"it runs moe-serve {hello.version}, node 0 runs {__version__}"
        with self._changed:
            before = self._nodes.get(hello.node_rank)
        if before is not None and before.hello.hostname != hello.hostname:
            return f"node {hello.node_rank} has already joined from {before.hello.hostname}"
        return None

    def _missing(self) -> list[int]:
        return [node for node in range(1, self.layout.num_nodes) if node not in self._nodes]

    def _who_is_missing(self, missing: list[int], timeout_s: float) -> str:
        names = ", ".join(f"node {node} ({self.layout.describe(node)})" for node in missing)
        refused = "".join(f" {host} was refused: {why}." for host, why in self._refused.items())
        rejected = self._listener.num_rejected if self._listener is not None else {}
        strangers = "".join(
            f" Refused connections: {count}, as {why}." for why, count in rejected.items()
        )
        return (
            f"{names} did not join within {timeout_s:g} s. Does the same command run "
            f"there, with the same secret, and can it reach this host?{refused}{strangers}"
        )
