"""Node 0 and the agents of other nodes, on one host: ranks are small programs that wait."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.control.secret import ClusterSecret, new_secret
from moe_serve.cluster.launch.environment import NodeEnvironment
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_agent import AgentMessage, NodeAgent, NodeLife, connect_agent
from moe_serve.cluster.launch.node_layout import share_out
from moe_serve.cluster.launch.node_ranks import AgentOrder, Dismiss, NodeHello, NodeRanks
from moe_serve.cluster.launch.node_starter import NodeStarter
from moe_serve.cluster.members.rank_starter import RankExit
from moe_serve.errors import ClusterError

ATTENTION, EXPERT = RankName("attention", 0), RankName("expert", 0)
PATIENCE_S = 200.0
# What a worker would be: writes its pid and arguments where the test looks, and waits.
WORKER = """
import os, pathlib, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
name = options["--role"] + "-" + options["--rank"]
file = pathlib.Path(sys.argv[1]) / f"{name}.{os.getpid()}"
file.with_suffix(".new").write_text(" ".join([*sys.argv[2:], os.environ["OMP_NUM_THREADS"]]))
file.with_suffix(".new").rename(file)
time.sleep(1000)
"""


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
        threading.Event().wait(0.01)


AgentOrLife = TypeVar("AgentOrLife", NodeAgent, NodeLife)


class Nodes:
    """Node 0 in this process, and agents on threads of it."""

    def __init__(self, folder: Path, num_nodes: int = 2) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.secret = new_secret()
        layout = share_out(all_ranks(1, num_nodes - 1), num_nodes)
        self.starter = NodeStarter(layout, self.ranks(), num_threads=None)
        self.starter.listen(HostPort("127.0.0.1", 0), self.secret)
        self.starter.use_coordinator(HostPort("127.0.0.1", 1234))
        self.threads: list[threading.Thread] = []
        self.agents: list[NodeAgent | NodeLife] = []
        self.ends: dict[int, ClusterError | None] = {}

    def ranks(self) -> NodeRanks:
        def command(*options: str) -> tuple[str, ...]:
            return (sys.executable, "-c", WORKER, str(self.folder), *options)

        return NodeRanks("127.0.0.1", self.secret, {}, command)

    def environment(self, node: int, num_nodes: int | None = None) -> NodeEnvironment:
        return NodeEnvironment(
            kind="flags",
            node_rank=node,
            num_nodes=num_nodes or self.num_nodes,
            coordinator_host="127.0.0.1",
            coordinator_port=self.starter.port,
        )

    def join(self, node: int, *, num_nodes: int | None = None, host: str = "host") -> NodeAgent:
        environment = self.environment(node, num_nodes)
        channel = connect_agent(environment, f"{host}-{node}", self.secret, PATIENCE_S)
        return self._run(node, NodeAgent(channel, self.ranks()))

    def live(self, node: int, rejoin_s: float) -> NodeLife:
        """A node that looks for node 0 again, as a launch's does."""
        environment = self.environment(node)

        def find(timeout_s: float) -> Channel[AgentMessage]:
            return connect_agent(environment, f"host-{node}", self.secret, timeout_s)

        life = NodeLife(find, lambda _: self.ranks(), start_timeout_s=PATIENCE_S, rejoin_s=rejoin_s)
        return self._run(node, life)

    def _run(self, node: int, agent: AgentOrLife) -> AgentOrLife:
        def run() -> None:
            try:
                agent.run()
                self.ends[node] = None
            except ClusterError as error:
                self.ends[node] = error

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)
        self.agents.append(agent)
        return agent

    def pids(self, rank: RankName) -> list[int]:
        files = sorted(self.folder.glob(f"{rank}.[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
        return [int(path.suffix[1:]) for path in files if path.suffix != ".new"]

    def started(self, rank: RankName, count: int = 1) -> int:
        until(lambda: len(self.pids(rank)) >= count, f"{rank} starts {count} times")
        return self.pids(rank)[-1]

    def exits(self, count: int = 1) -> list[RankExit]:
        found: list[RankExit] = []

        def look() -> bool:
            found.extend(self.starter.exited())
            return len(found) >= count

        until(look, f"{count} exits")
        return found

    def close(self) -> None:
        self.starter.stop()
        for agent in self.agents:
            agent.stop()
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "an agent did not end"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        yield made
    finally:
        made.close()


def is_running(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # gone in between
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


def test_ranks_start_on_their_nodes_and_end_with_the_launch(nodes: Nodes) -> None:
    nodes.join(1)
    nodes.starter.wait_for_nodes(PATIENCE_S)
    nodes.starter.start(ATTENTION)
    nodes.starter.start(EXPERT)
    pids = [nodes.started(ATTENTION), nodes.started(EXPERT)]
    words = next(nodes.folder.glob("expert-0.*")).read_text().split()
    assert words[:-1] == [
        "--coordinator", "127.0.0.1:1234", "--role", "expert", "--rank", "0",
        "--host", "127.0.0.1",
    ]  # fmt: skip
    assert int(words[-1]) >= 1, "threads: the node's share"
    assert nodes.starter.exited() == []
    nodes.close()
    assert nodes.ends == {1: None}, "dismissed, not lost"
    assert not any(is_running(pid) for pid in pids)


def test_a_rank_that_dies_is_told_once_and_starts_again(nodes: Nodes) -> None:
    nodes.join(1)
    nodes.starter.start(EXPERT)
    first = nodes.started(EXPERT)
    os.kill(first, signal.SIGKILL)
    assert nodes.exits() == [RankExit("expert-0", "was killed by SIGKILL")]
    nodes.starter.kill(EXPERT)
    nodes.starter.start(EXPERT)
    second = nodes.started(EXPERT, 2)
    assert second != first and nodes.starter.exited() == []


def test_kill_ends_a_frozen_rank_and_is_no_exit(nodes: Nodes) -> None:
    nodes.join(1)
    nodes.starter.start(EXPERT)
    pid = nodes.started(EXPERT)
    os.kill(pid, signal.SIGSTOP)
    nodes.starter.kill(EXPERT)
    until(lambda: not is_running(pid), "the frozen rank is killed")
    nodes.starter.start(EXPERT)
    nodes.started(EXPERT, 2)
    assert nodes.starter.exited() == []


def test_a_rank_waits_for_its_node(nodes: Nodes) -> None:
    nodes.starter.start(EXPERT)
    assert nodes.pids(EXPERT) == []
    nodes.join(1)
    nodes.started(EXPERT)


def test_a_lost_node_takes_its_ranks_along_and_may_come_back(nodes: Nodes) -> None:
    agent = nodes.join(1)
    nodes.starter.start(EXPERT)
    first = nodes.started(EXPERT)
    agent.stop()
    (exit_,) = nodes.exits()
    assert exit_.name == "expert-0" and "lost with node 1 (host-1)" in exit_.why
    until(lambda: not is_running(first), "the agent ends its ranks")
    nodes.starter.kill(EXPERT)
    nodes.starter.start(EXPERT)
    nodes.join(1)
    nodes.started(EXPERT, 2)


def test_an_agent_that_is_told_to_stop_waits_for_node_0(nodes: Nodes) -> None:
    agent = nodes.join(1)
    nodes.starter.start(EXPERT)
    pid = nodes.started(EXPERT)
    agent.stop(grace_s=1000.0)
    os.kill(pid, signal.SIGKILL)
    assert nodes.exits(), "it still reports, so it still serves"
    nodes.starter.stop()
    until(lambda: 1 in nodes.ends, "dismissed")
    assert nodes.ends[1] is None


def test_a_second_signal_ends_an_agent(nodes: Nodes) -> None:
    agent = nodes.join(1)
    for _ in range(2):
        agent.stop(grace_s=1000.0)
    until(lambda: 1 in nodes.ends, "the agent ends")


def test_agents_end_when_node_0_is_lost(nodes: Nodes) -> None:
    nodes.join(1)
    nodes.starter.start(EXPERT)
    pid = nodes.started(EXPERT)
    remote = nodes.starter._nodes[1]
    remote.close()  # the connection breaks without a word
    until(lambda: 1 in nodes.ends, "the agent ends")
    assert "node 0 is lost" in str(nodes.ends[1])
    assert not is_running(pid)


def test_a_node_that_lost_node_0_comes_back(nodes: Nodes) -> None:
    """Its ranks end, and are started anew when node 0 has taken it in again."""
    nodes.live(1, rejoin_s=PATIENCE_S)
    nodes.starter.start(EXPERT)
    first = nodes.started(EXPERT)
    for count in (2, 3):
        nodes.starter._nodes[1].close()
        assert [exit_.name for exit_ in nodes.exits()] == ["expert-0"]
        nodes.starter.kill(EXPERT)
        nodes.starter.start(EXPERT)  # as the coordinator does for a rank that is lost
        assert nodes.started(EXPERT, count) != first and not is_running(first)
    nodes.starter.stop()
    until(lambda: 1 in nodes.ends, "dismissed")
    assert nodes.ends[1] is None


@pytest.mark.parametrize("rejoin_s", [0.0, 0.5])
def test_a_node_that_does_not_find_node_0_again_ends(nodes: Nodes, rejoin_s: float) -> None:
    nodes.live(1, rejoin_s)
    nodes.starter.start(EXPERT)
    pid = nodes.started(EXPERT)
    vanish(nodes)
    until(lambda: 1 in nodes.ends, "the node ends")
    why = str(nodes.ends[1])
    assert (
        "node 0 is lost" in why and f"not found again in {rejoin_s:g} s (cluster.rejoin_s)" in why
    )
    assert not is_running(pid)


def test_a_node_that_looks_for_node_0_ends_at_the_first_signal(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    life = nodes.live(1, rejoin_s=10 * PATIENCE_S)
    vanish(nodes)
    until(lambda: "looking for node 0" in caplog.text, "the loss is noticed")
    life.stop(grace_s=1000.0)
    until(lambda: 1 in nodes.ends, "the node ends")
    assert nodes.ends[1] is None


def vanish(nodes: Nodes) -> None:
    """Node 0 is gone without a word."""
    until(lambda: 1 in nodes.starter._nodes, "node 1 is taken in")
    assert nodes.starter._listener is not None
    nodes.starter._listener.close()
    nodes.starter._nodes[1].close()


def test_missing_nodes_are_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, num_nodes=4)
    try:
        nodes.join(2)
        until(lambda: 2 in nodes.starter._nodes, "node 2 is taken in")
        with pytest.raises(ClusterError, match=r"node 1 \(expert 0\), node 3 \(expert 2\) did not"):
            nodes.starter.wait_for_nodes(0.1)
    finally:
        nodes.close()


@pytest.mark.parametrize(
    ("node", "num_nodes", "why"),
    [
        (1, 3, "it was started for 3 nodes, node 0 for 2"),
        (0, 2, "its number is 0, but nodes are numbered 0 to 1, and node 0 is taken"),
        (2, 2, "its number is 2, but nodes are numbered 0 to 1, and node 0 is taken"),
    ],
)
def test_an_agent_that_does_not_fit_is_refused(
    nodes: Nodes, node: int, num_nodes: int, why: str
) -> None:
    nodes.join(node, num_nodes=num_nodes)
    until(lambda: node in nodes.ends, "the agent ends")
    assert f"node 0 refuses this node: {why}" in str(nodes.ends[node])
    with pytest.raises(ClusterError, match=f"host-{node} was refused: {why}"):
        nodes.starter.wait_for_nodes(0.1)


def test_two_hosts_cannot_be_one_node(nodes: Nodes) -> None:
    nodes.join(1)
    nodes.starter.wait_for_nodes(PATIENCE_S)
    channel = connect_agent(nodes.environment(1), "other", nodes.secret, PATIENCE_S)
    order = channel.receive(PATIENCE_S)
    channel.close()
    assert isinstance(order, Dismiss) and "node 1 has already joined from host-1" in str(order.why)


def test_another_version_is_refused(nodes: Nodes) -> None:
    decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentOrder)
    channel: Channel[AgentMessage] = connect(
        "127.0.0.1", nodes.starter.port, nodes.secret, decoder, PATIENCE_S
    )
    channel.send(NodeHello(node_rank=1, num_nodes=2, hostname="h", host="127.0.0.1", version="0"))
    order = channel.receive(PATIENCE_S)
    channel.close()
    assert isinstance(order, Dismiss) and "it runs moe-serve 0" in str(order.why)


def test_a_stranger_is_no_node(nodes: Nodes) -> None:
    with pytest.raises(ClusterError, match="node 1 does not find node 0 .* secrets differ"):
        connect_agent(nodes.environment(1), "h", ClusterSecret("x" * 40), PATIENCE_S)
    listener = nodes.starter._listener
    assert listener is not None
    until(lambda: listener.num_rejected, "the handshake is counted, after it has ended")
    with pytest.raises(ClusterError, match="Refused connections: 1, as the cluster secrets differ"):
        nodes.starter.wait_for_nodes(0.1)


def test_a_worker_that_cannot_start_is_an_exit(nodes: Nodes, tmp_path: Path) -> None:
    ranks = NodeRanks("127.0.0.1", nodes.secret, {}, lambda *_: (str(tmp_path / "missing"),))
    starter = NodeStarter(share_out(all_ranks(1, 1), 1), ranks)
    starter.use_coordinator(HostPort("127.0.0.1", 1))
    starter.start(EXPERT)
    (exit_,) = starter.exited()
    starter.stop()
    assert exit_.name == "expert-0" and "did not start: cannot start expert-0" in exit_.why
