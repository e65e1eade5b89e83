"""Nodes that join a launch which serves: on threads, with node 0 in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moe_serve.cli.launch.launch_node import starter_of_cells
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret, new_secret
from moe_serve.cluster.launch.cell_nodes import CellNodes, ranks_of_cells
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_agent import (
    AgentMessage,
    JoiningNode,
    NodeAgent,
    connect_joining,
)
from moe_serve.cluster.launch.node_layout import share_out
from moe_serve.cluster.launch.node_ranks import KillRank, NodeRanks, RankEnded, StartRank
from moe_serve.cluster.launch.node_starter import NodeStarter
from moe_serve.cluster.started_cells import build_cells
from moe_serve.config.cells import parse_cells
from moe_serve.engine.watch.cells_control import CellPlace
from moe_serve.errors import CellsError, ClusterError
from tests.support.cluster.cells_drive import (
    cells_config,
    check_nothing_is_held,
    in_one_process,
    wait_until_whole,
)
from tests.support.cluster.layouts import requests, serve
from tests.support.cluster.thread_starter import ThreadStarter

LONGEST_S = 100.0
LAYOUT = "1x(1A1E)"
WANTED = requests(4, 4096, num_tokens=12)


class ThreadRanks(NodeRanks):
    """Ranks of a node as threads of this process."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret
        self._starters: dict[RankName, tuple[ThreadStarter, RankName]] = {}

    def start(self, order: StartRank) -> None:
        at = order.coordinator_host, order.coordinator_port
        rank = RankName(order.role, order.index if order.number is None else order.number)
        starter = ThreadStarter(*at, self._secret, 1)
        self._starters[RankName(order.role, order.index)] = starter, rank
        starter.start(rank)

    def kill(self, order: KillRank) -> None:
        found = self._starters.get(RankName(order.role, order.index))
        if found is not None:
            found[0].kill(found[1])

    def ended(self) -> list[RankEnded]:
        return []

    def stop(self) -> None:
        for starter, rank in self._starters.values():
            starter.kill(rank)
        for starter, _ in self._starters.values():
            starter.stop()


class Launch:
    """Node 0 with one cell, and agents of nodes that join on threads."""

    def __init__(self, join_s: float | None) -> None:
        self.secret = new_secret()
        self.agents: dict[str, NodeAgent] = {}
        self.channels: dict[str, Channel[AgentMessage]] = {}
        self.threads: list[threading.Thread] = []
        self.failures: list[str] = []
        shapes = parse_cells(LAYOUT)

        def make_nodes(secret: ClusterSecret) -> NodeStarter:
            self.secret = secret
            layout = share_out(ranks_of_cells(shapes), 1)
            self.starter = NodeStarter(layout, ThreadRanks(secret), join_s=join_s)
            self.starter.listen(HostPort("127.0.0.1", 0), secret)
            return self.starter

        nodes = CellNodes(make_nodes, shapes)
        of = cells_config(LAYOUT, can_grow=True)
        built = build_cells(of, starter_of=starter_of_cells(nodes), nodes=nodes)
        assert isinstance(built.engine, CellsEngine)
        self.engine = built.engine
        nodes.remove_cell = self.engine.remove_cell

    def join(self, name: str, num_places: int = 2, agent: str = "") -> None:
        """Lets a node join; a refusal is noted."""
        at = HostPort("127.0.0.1", self.starter.port)
        node = JoiningNode(name=name, num_places=num_places, coordinator=at, agent=agent or name)
        channel = connect_joining(node, "host", self.secret, LONGEST_S)
        own = NodeAgent(channel, ThreadRanks(self.secret), has_joined=True)

        def run() -> None:
            try:
                own.run()
            except ClusterError as error:
                self.failures.append(str(error))

        thread = threading.Thread(target=run, name=f"agent-{name}")
        self.agents[name], self.channels[name] = own, channel
        self.threads.append(thread)
        thread.start()

    def nodes(self) -> dict[str, tuple[int, bool]]:
        return {each.name: (each.num_ranks, each.is_there) for each in self.engine.nodes()}

    def states(self) -> dict[str, str]:
        return {cell.name: cell.state for cell in self.engine.stats().cells}

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST_S
        while not is_so():
            assert time.monotonic() < end, f"{self.nodes()}, {self.states()}, {self.failures}"
            self.engine.nudge()
            self.engine.step()
            time.sleep(0.002)


@contextmanager
def launched(join_s: float | None = LONGEST_S) -> Iterator[Launch]:
    launch = Launch(join_s)
    try:
        yield launch
    finally:
        launch.engine.close()
        for agent in launch.agents.values():
            agent.stop()
        for thread in launch.threads:
            thread.join(LONGEST_S)
            assert not thread.is_alive(), "an agent does not end"


def test_a_node_joins_gets_a_cell_and_takes_only_that_when_it_leaves_or_dies() -> None:
    expected = in_one_process(cells_config(LAYOUT), WANTED)
    with launched(join_s=0.1) as launch:
        engine: Any = launch.engine
        launch.join("beta")
        launch.until(lambda: launch.nodes() == {"0": (2, True), "beta": (0, True)})
        with pytest.raises(CellsError, match="3 ranks and node beta has 2 free places"):
            engine.add_cell("1A2E", place=CellPlace(node="beta"))
        with pytest.raises(CellsError, match="no node 'gamma' .* the nodes 0, beta"):
            engine.add_cell("1A1E", place=CellPlace(node="gamma"))
        engine.add_cell("1A1E", place=CellPlace(node="beta"))
        launch.until(lambda: launch.states().get("cell-1") == "serving")
        assert launch.nodes() == {"0": (2, True), "beta": (2, True)}
        engine.drain(0, is_draining=True)
        assert serve(engine, WANTED) == expected, "on the new node alone"
        engine.drain(0, is_draining=False)
        launch.agents["beta"].stop(LONGEST_S)  # SIGTERM
        launch.until(lambda: launch.states() == {"cell-0": "serving"})
        launch.until(lambda: launch.nodes() == {"0": (2, True)})
        assert serve(engine, WANTED) == expected
        launch.join("gamma")
        launch.until(lambda: "gamma" in launch.nodes())
        engine.add_cell("1A1E")  # node 0 has more ranks
        launch.until(lambda: launch.states().get("cell-2") == "serving")
        assert launch.nodes()["gamma"] == (2, True)
        launch.channels["gamma"].close()  # its host is lost
        assert serve(engine, WANTED) == expected
        launch.until(lambda: launch.states() == {"cell-0": "serving"})
        wait_until_whole(engine)
        check_nothing_is_held(engine)
        assert launch.failures == [] or "node 0 is lost" in launch.failures[0]


def test_a_node_that_cannot_join_is_told_why() -> None:
    with launched() as launch:
        launch.join("beta")
        launch.until(lambda: "beta" in launch.nodes())
        for name, num_places in (("beta", 2), ("7", 2), ("gamma", 0)):
            launch.join(name, num_places, agent="another")
        launch.until(lambda: len(launch.failures) == 3)
        launch.starter._join_s = None
        launch.join("delta")
        launch.until(lambda: len(launch.failures) == 4)
    said = " ".join(launch.failures)
    for why in (
        "a node named beta has joined before",
        "'7' cannot name a node",
        "it offers 0 places",
        "this launch has no cells",
    ):
        assert why in said, said
