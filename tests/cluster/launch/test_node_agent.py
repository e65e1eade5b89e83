"""An agent whose rank does not end: the node goes on, and so do its other ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from moe_serve import __version__
from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.listener import Listener
from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.control.secret import new_secret
from moe_serve.cluster.launch import node_agent
from moe_serve.cluster.launch.node_agent import NodeAgent
from moe_serve.cluster.launch.node_layout import share_out
from moe_serve.cluster.launch.node_ranks import (
    AgentOrder,
    AgentReport,
    Dismiss,
    KillRank,
    NodeAlive,
    NodeHello,
    NodeRanks,
    RankEnded,
    StartRank,
)
from moe_serve.cluster.launch.node_starter import NodeStarter
from moe_serve.errors import ClusterError

PATIENCE_S = 200.0
STUCK = "expert-0 (pid 7) does not end 10 s after SIGKILL"


class StuckRanks(NodeRanks):
    """Its one process is stuck in the kernel."""

    def __init__(self) -> None:
        self.is_killing, self.may_return = threading.Event(), threading.Event()

    def kill(self, order: KillRank) -> None:
        self.is_killing.set()
        assert self.may_return.wait(PATIENCE_S), "nobody lets it return"
        raise ClusterError(STUCK)

    def ended(self) -> list[RankEnded]:
        return []

    def stop(self) -> None: ...


@pytest.fixture
def ends() -> Iterator[tuple[Channel[Any], Channel[Any]]]:
    """(the agent's, node 0's)"""
    secret, accepted = new_secret(), SimpleQueue[Channel[Any]]()
    reports: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AgentReport)
    orders: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AgentOrder)
    listener = Listener("127.0.0.1", 0, secret, reports, accepted.put)
    near = connect("127.0.0.1", listener.port, secret, orders, PATIENCE_S)
    far = accepted.get(timeout=PATIENCE_S)
    yield near, far
    for end in (near, far, listener):
        end.close()


def test_a_process_that_does_not_end_costs_no_node(
    ends: tuple[Channel[Any], Channel[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    monkeypatch.setattr(node_agent, "ALIVE_PERIOD_S", 0.01)
    sent, send = SimpleQueue[object](), near.send

    def noted(message: msgspec.Struct) -> None:
        sent.put(message)
        send(message)

    monkeypatch.setattr(near, "send", noted)
    ranks = StuckRanks()
    agent = NodeAgent(near, ranks)
    failures: list[ClusterError] = []

    def run() -> None:
        try:
            agent.run()
        except ClusterError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    far.send(KillRank(role="expert", index=0))
    assert ranks.is_killing.wait(PATIENCE_S)
    while not sent.empty():
        sent.get()
    for _ in range(3):
        assert isinstance(sent.get(timeout=PATIENCE_S), NodeAlive), "it says so while it waits"
    ranks.may_return.set()
    far.send(Dismiss())
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and failures == []


def test_a_rank_that_cannot_make_way_is_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = NodeRanks("127.0.0.1", new_secret(), {})

    def stuck(name: str) -> None:
        raise ClusterError(STUCK)

    monkeypatch.setattr(ranks._processes, "kill", stuck)
    order = StartRank(
        role="expert",
        index=0,
        start=2,
        coordinator_host="127.0.0.1",
        coordinator_port=1,
        place=0,
        num_neighbours=1,
    )
    ranks.start(order)
    (ended,) = ranks.ended()
    ranks.stop()
    assert (ended.start, ended.why) == (2, f"did not start: {STUCK}")


def test_an_agent_that_comes_while_node_0_ends_is_dismissed(
    ends: tuple[Channel[Any], Channel[Any]],
) -> None:
    """Its handshake was under way when the launch ended: it would wait for orders."""
    near, far = ends
    starter = NodeStarter(share_out(all_ranks(1, 1), 2), StuckRanks())
    near.send(
        NodeHello(node_rank=1, num_nodes=2, hostname="h", host="127.0.0.1", version=__version__)
    )
    starter.stop()
    starter.admit(far)
    assert near.receive(PATIENCE_S) == Dismiss()
