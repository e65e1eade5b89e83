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
from moe_serve.cluster.launch.node_places import NodePlaces, objection_to_node
from moe_serve.cluster.launch.node_ranks import (
    AgentReport,
    Dismiss,
    KillRank,
    NodeHello,
    NodeRanks,
    RankEnded,
    StartRank,
    Welcome,
)
from moe_serve.cluster.launch.remote_node import RemoteNode
from moe_serve.cluster.members.rank_starter import RankExit
from moe_serve.engine.watch.cells_control import NodeStatus
from moe_serve.errors import ChannelClosedError, ClusterError

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
        join_s: float | None = None,
    ) -> None:
        """With `join_s`, further nodes may join, and the cells of a lost node are kept for this
        many seconds; with None no node may join.
        """
        self._places, self._local = NodePlaces(layout), local
        self._devices, self._num_threads = devices or {}, num_threads
        self._join_s = join_s
        # called when cells with these ranks must leave because their node leaves or is lost
        self.on_leaves: Callable[[Sequence[RankName]], None] = lambda ranks: None
        self._coordinator: HostPort | None = None
        self._changed = threading.Condition()  # guards the fields below
        self._nodes: dict[int, RemoteNode] = {}
        self._wanted: dict[str, StartRank] = {}
        self._num_starts: dict[str, int] = {}
        self._ended: list[RankExit] = []
        self._refused: dict[str, str] = {}  # host -> why
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

    @property
    def layout(self) -> NodeLayout:
        """The ranks of all nodes. It is replaced, never changed."""
        return self._places.layout

    def add(self, ranks: Sequence[RankName], node: str | None = None) -> None:
        """Gives places on the nodes to further ranks, those of removed ranks first. Raises
        CellsError if there is no room. For `node` see `check_room`.
        """
        with self._changed:
            self._places.add(ranks, node, self._nodes)

    def remove(self, ranks: Iterable[RankName]) -> None:
        """Frees the places of killed ranks. Dismisses leaving nodes that have no other ranks."""
        with self._changed:
            free = self._places.remove(ranks)
            gone = [self._nodes.pop(number) for number in free if number in self._nodes]
        for node in gone:
            node.send(Dismiss())
            _log.info("node %s has left", node.name)

    def check_room(self, num_ranks: int, node: str | None) -> None:
        """Raises CellsError unless there is room for this many more ranks. `node` is the name of a
        joined node, the number of one of the first nodes, or None for all nodes together.
        """
        with self._changed:
            self._places.check_room(num_ranks, node, self._nodes)

    def statuses(self, cell_of: Callable[[RankName], str]) -> tuple[NodeStatus, ...]:
        """Returns the nodes with their ranks. `cell_of`: the cell of a rank."""
        with self._changed:
            return self._places.statuses(self._nodes, cell_of)

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
                num_threads=self._num_threads if node < self._places.num_first else None,
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
            _log.warning("%s starts when node %s is back", rank, self._places.name_of(node))

    def place_of(self, rank: RankName) -> str:
        return f"node {self._places.name_of(self.layout.node_of(rank))}"

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
                name = hello.joins or hello.node_rank
                _log.warning("node %s on %s is refused: %s", name, hello.hostname, why)
                with self._changed:
                    self._refused[hello.hostname] = why
                channel.send(Dismiss(why=why))
                channel.close()
                return
            self._take_in(
                RemoteNode(
                    hello,
                    channel,
                    on_ended=self._note_end,
                    on_leaves=lambda node: self._let_leave(node.number),
                    on_gone=self._lose,
                )
            )
        except ChannelClosedError as error:
            _log.warning("an agent left before it was admitted: %s", error)

    def _take_in(self, node: RemoteNode) -> None:
        orders, before = list[StartRank](), None
        with self._changed:
            is_late = self._is_stopped
            if not is_late:
                if node.hello.joins:
                    node.number = self._places.join(node.hello)
                before = self._nodes.get(node.number)
                self._nodes[node.number] = node
                names = {str(rank) for rank in self.layout.nodes[node.number]}
                orders = [order for name, order in self._wanted.items() if name in names]
        if is_late:  # it connected while we were ending, so it is dismissed here
            node.send(Dismiss())
            node.close()
            return
        if before is not None:
            before.close()
        node.send(Welcome())
        for order in orders:
            node.send(order)
        node.watch()
        hello, num = node.hello, node.hello.num_places
        places = f", with {num} places" if hello.joins else ""
        _log.info("node %s joined: %s at %s%s", node.name, hello.hostname, hello.host, places)
        with self._changed:
            self._changed.notify_all()

    def _let_leave(self, number: int) -> None:
        """Removes the cells of a joined node, and then dismisses the node."""
        with self._changed:
            if number < self._places.num_first or self._is_stopped:
                return
            self._places.leaving.add(number)
            ranks = self._places.ranks_on(number)
        if ranks:
            _log.info("node %s leaves: its cells are removed", self._places.name_of(number))
            self.on_leaves(ranks)
        else:
            self.remove(())

    def _give_up(self, number: int) -> None:
        """Removes the cells of a lost node if it has not come back."""
        with self._changed:
            is_back = number in self._nodes
        if not is_back:
            self._let_leave(number)

    def _lose(self, node: RemoteNode, why: str) -> None:
        number = node.number
        with self._changed:
            if self._is_stopped or self._nodes.get(number) is not node:
                return
            del self._nodes[number]
            reason = f"lost with node {node.name} ({node.hello.hostname}): {why}"
            self._ended += [RankExit(str(rank), reason) for rank in self.layout.nodes[number]]
        _log.warning("node %s (%s) is lost: %s", node.name, node.hello.hostname, why)
        if number >= self._places.num_first and self._join_s is not None:
            timer = threading.Timer(self._join_s, self._give_up, (number,))
            timer.daemon = True
            timer.start()

    def _note_end(self, ended: RankEnded) -> None:
        name = str(RankName(ended.role, ended.index))
        with self._changed:
            wanted = self._wanted.get(name)
            if wanted is not None and wanted.start == ended.start:
                self._ended.append(RankExit(name, ended.why))

    def _objection(self, hello: NodeHello) -> str | None:
        num_nodes = self._places.num_first
        if hello.joins:
            return self._objection_to_join(hello)
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

    def _objection_to_join(self, hello: NodeHello) -> str | None:
        if hello.version != __version__:
            return f"it runs moe-serve {hello.version}, node 0 runs {__version__}"
        if self._join_s is None:
            return "this launch has no cells (--cells), and a node can only get ranks of new cells"
        with self._changed:
            if self._missing():
                return "the first nodes of the launch are not all connected yet: try again later"
            number = self._places.number_of(hello.joins)
            before = None if number is None else self._nodes.get(number)
        if before is not None and before.hello.agent != hello.agent:
            return f"a node named {hello.joins} has joined before: give another --node to this one"
        return objection_to_node(hello.joins, hello.num_places)

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._places.num_first) if node not in self._nodes]

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
