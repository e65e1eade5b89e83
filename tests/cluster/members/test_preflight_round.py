"""A pre-flight from the first hello to its sentences, with answers made by the ranks' own code."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from moe_serve.cluster.control.messages import Examine, Examined, Hello, Order, Report
from moe_serve.cluster.control.probe import ProbePort
from moe_serve.cluster.members.preflight import ExpectedRank, PreflightRound, examine, versions

NAMES = ("attention-0", "expert-0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def new_round(folder: Path) -> PreflightRound:
    expected = [ExpectedRank(name=name, node=f"node {i}") for i, name in enumerate(NAMES)]
    return PreflightRound(expected, folder, "127.0.0.1")


def hello(name: str, port: int = 0) -> Hello:
    return Hello(name=name, pid=1, host="127.0.0.1", versions=versions(), probe_port=port)


def over_the_wire(order: Examine) -> Examined:
    """Both messages through their unions, as the channel does it."""
    encode = msgspec.msgpack.encode
    arrived = msgspec.msgpack.decode(encode(order), type=Order)
    assert isinstance(arrived, Examine)
    answer = msgspec.msgpack.decode(encode(examine(arrived)), type=Report)
    assert isinstance(answer, Examined)
    return answer


def test_ranks_of_one_checkpoint_that_reach_each_other(folder: Path) -> None:
    round_ = new_round(folder)
    with ProbePort("127.0.0.1") as first, ProbePort("127.0.0.1") as second:
        round_.came(hello(NAMES[0], first.port))
        assert not round_.has_all_come
        round_.came(hello(NAMES[1], second.port))
        assert round_.has_all_come and not round_.is_done
        for name in NAMES:
            round_.examined(name, over_the_wire(round_.order))
    assert round_.is_done
    assert round_.problems(1) == []


def test_who_did_not_come_and_who_did_not_answer(folder: Path) -> None:
    round_ = new_round(folder)
    round_.came(hello(NAMES[0]))
    texts = [str(problem) for problem in round_.problems(5)]
    assert texts == ["no rank of node 1 came within 5 s: expert-0."]
    round_.came(hello(NAMES[1]))
    round_.examined(NAMES[0], over_the_wire(round_.order))
    texts = [str(problem) for problem in round_.problems(5)]
    assert texts == ["expert-0 cannot be examined: it did not answer within 5 s"]


def test_another_checkpoint_and_a_closed_port(folder: Path) -> None:
    round_ = new_round(folder)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        closed = unused.getsockname()[1]
        for name in NAMES:
            round_.came(hello(name, closed if name == "expert-0" else 0))
        for name in NAMES:
            round_.examined(name, over_the_wire(round_.order))
        (folder / "model.safetensors").write_bytes(bytes(999))
        round_.came(hello("expert-0", closed))  # restarted: its old answer is void
        assert not round_.is_done
        round_.examined("expert-0", over_the_wire(round_.order))
    texts = [str(problem) for problem in round_.problems(5)]
    assert len(texts) == 2, texts
    assert texts[0].startswith("the checkpoint's file model.safetensors has 999 bytes with hash")
    assert texts[1] == (
        "none of attention-0 (127.0.0.1), expert-0 (127.0.0.1) can reach expert-0 on 127.0.0.1 "
        f"port {closed}: Connection refused."
    )
