"""Ranks at the start of a cluster, played by threads: no rank loads before all fit. Ranks that
fall silent are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.listener import Listener
from moe_serve.cluster.control.messages import (
    Configure,
    Examine,
    Hello,
    Loaded,
    Order,
    Report,
    Stop,
)
from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.control.secret import new_secret
from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.preflight import ExpectedRank, PreflightRound, examine, versions
from moe_serve.cluster.members.rank_starter import RankExit
from moe_serve.cluster.members.roster import Heartbeats, RankPhase, Roster, Silence
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.opened_model import LoadReport
from moe_serve.errors import ChannelClosedError, ClusterError

WEIGHTS = "the hash"


class Talkers:
    """Implements RankStarter. `absent` never come, `folders` and `torch` are what a rank has."""

    def __init__(self, listener: Listener[Any], secret: Any) -> None:
        self._listener, self._secret = listener, secret
        self._threads: list[threading.Thread] = []
        self.absent: set[str] = set()
        self.folders: dict[str, Path] = {}
        self.torch: dict[str, str] = {}
        self.orders: list[tuple[str, str]] = []  # (rank, kind) as they arrive

    def start(self, rank: RankName) -> None:
        if str(rank) not in self.absent:
            thread = threading.Thread(target=self._talk, args=(str(rank),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def place_of(self, rank: RankName) -> str:
        return "node 1" if rank.role == "expert" else "node 0"

    def kill(self, rank: RankName) -> None: ...

    def exited(self) -> list[RankExit]:
        return []

    def stop(self) -> None:
        for thread in self._threads:
            thread.join(60)

    def _talk(self, name: str) -> None:
        port, decoder = self._listener.port, msgspec.msgpack.Decoder(Order)
        channel: Channel[Any] = connect("127.0.0.1", port, self._secret, decoder, 60)
        theirs = versions() | ({"torch": self.torch[name]} if name in self.torch else {})
        channel.send(Hello(name=name, pid=1, host="127.0.0.1", versions=theirs))
        try:
            while not isinstance(order := channel.receive(60), Stop):
                self.orders.append((name, type(order).__name__))
                if isinstance(order, Examine):
                    folder = self.folders.get(name, Path(order.folder))
                    channel.send(examine(msgspec.structs.replace(order, folder=str(folder))))
                elif isinstance(order, Configure):
                    channel.send(loaded())
        except ChannelClosedError:
            pass
        finally:
            channel.close()


def loaded() -> Loaded:
    return Loaded(
        weights_hash=WEIGHTS,
        report=LoadReport(
            kernels="torch",
            num_threads=1,
            dtype="float32",
            device="cpu",
            weight_format="plain",
            expert_weights="exact",
            num_pages=1,
            kv_bytes=1,
        ),
        load_seconds=0.0,
    )


class Scene:
    """A membership of one attention and two expert ranks, and who plays them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.membership = Membership(
            Roster(all_ranks(1, 2)), lambda _: configure(folder), WEIGHTS, heartbeat_s=600.0
        )
        secret = new_secret()
        self.listener: Listener[Any] = Listener(
            "127.0.0.1", 0, secret, msgspec.msgpack.Decoder(Report), self.membership.admit
        )
        self.talkers = Talkers(self.listener, secret)

    def start(self, timeout_s: float = 30.0) -> None:
        states = self.membership.roster.all()
        expected = [
            ExpectedRank(name=str(state.name), node=self.talkers.place_of(state.name))
            for state in states
        ]
        preflight = PreflightRound(expected, self.folder, "127.0.0.1")
        self.membership.start(self.talkers, preflight, timeout_s, None)

    def close(self) -> None:
        self.membership.close()
        self.listener.close()


def configure(folder: Path) -> Configure:
    return Configure(
        config=EngineConfig(),
        folder=str(folder),
        num_threads=1,
        held={},
        router_on_experts=False,
        is_recording=False,
    )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    opened = Scene(folder)
    yield opened
    opened.close()


def test_nobody_loads_before_all_were_examined(scene: Scene) -> None:
    scene.start()
    phases = {state.phase for state in scene.membership.roster.all()}
    assert phases == {RankPhase.READY}
    kinds = [kind for _, kind in scene.talkers.orders]
    assert kinds == ["Examine"] * 3 + ["Configure"] * 3


def test_what_does_not_fit_is_named_and_nothing_is_loaded(scene: Scene, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    scene.talkers.folders["expert-1"] = other
    scene.talkers.torch["expert-0"] = "2.11.0"
    with pytest.raises(ClusterError) as caught:
        scene.start()
    first, second = str(caught.value).split("\n")
    assert first.startswith("torch is 2.11.0 on expert-0, but ")
    assert second.startswith("the checkpoint's file model.safetensors is missing on expert-1, but")
    assert "Configure" not in {kind for _, kind in scene.talkers.orders}


def test_who_never_came_is_named_by_node(scene: Scene) -> None:
    scene.talkers.absent = {"expert-0", "expert-1"}
    with pytest.raises(
        ClusterError, match="no rank of node 1 reported within 0.3 s: expert-0, expert"
    ):
        scene.start(0.3)
    assert scene.talkers.orders == []


def test_closing_ends_the_wait_for_ranks_that_do_not_come(scene: Scene) -> None:
    """Ctrl-C during the start of several cells, each of which a thread starts."""
    scene.talkers.absent = {"expert-0"}
    threading.Timer(0.1, scene.membership.close).start()
    with pytest.raises(ClusterError, match="cancelled"):
        scene.start(300.0)


def test_another_checkpoint_is_refused_by_name(scene: Scene) -> None:
    """A rank that loaded what the pre-flight could not tell from the right one."""
    scene.membership._weights = "another hash"
    with pytest.raises(
        ClusterError, match=r"(expert|attention)-\d is refused: its checkpoint differs"
    ):
        scene.start()


def test_who_came_and_was_not_let_in_yet_is_told_to_stop(scene: Scene) -> None:
    """Its hello lies in the inbox, or is still on its way."""
    port, decoder = scene.listener.port, msgspec.msgpack.Decoder(Order)
    channel: Channel[Any] = connect("127.0.0.1", port, scene.talkers._secret, decoder, 60)
    channel.send(Hello(name="expert-0", pid=1, host="127.0.0.1", versions={}))
    assert scene.membership.inbox.get(timeout=60).name == "expert-0"
    scene.membership.close()
    assert isinstance(channel.receive(60), Stop)
    with pytest.raises(ChannelClosedError):
        channel.receive(60)
    late: Channel[Any] = connect("127.0.0.1", port, scene.talkers._secret, decoder, 60)
    with pytest.raises(ChannelClosedError):
        late.receive(60)
    channel.close()
    late.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_late_after_three_periods_and_longest_first() -> None:
    clock = Clock()
    beats: Heartbeats[int] = Heartbeats(1.0, 3, clock)
    assert beats.late() == []
    beats.beat(0)  # at 100: late from 103
    clock.now_s = 101.0
    beats.beat(1)  # late from 104
    clock.now_s = 102.9
    assert beats.late() == []
    clock.now_s = 103.0
    assert beats.late() == [Silence(0, 3.0)]
    clock.now_s = 105.5
    assert beats.late() == [Silence(0, 5.5), Silence(1, 4.5)]


def test_a_beat_ends_the_silence_and_forget_the_watch() -> None:
    clock = Clock()
    beats: Heartbeats[str] = Heartbeats(0.5, 2, clock)
    beats.beat("expert 0")
    beats.beat("expert 1")
    clock.now_s += 1.0
    beats.beat("expert 0")
    beats.forget("expert 1")
    beats.forget("expert 1")
    assert beats.late() == [], "one has spoken and the other is not expected"
    clock.now_s += 1.0
    assert beats.late() == [Silence("expert 0", 1.0)]


def test_a_listener_that_was_away_excuses_all() -> None:
    clock = Clock()
    beats: Heartbeats[int] = Heartbeats(1.0, 3, clock)
    beats.beat(0)
    clock.now_s += 60.0  # this process was stopped; what was sent meanwhile is not read yet
    beats.excuse()
    assert beats.late() == []
    clock.now_s += 3.0
    assert beats.late() == [Silence(0, 3.0)], "it was given the whole time again"
