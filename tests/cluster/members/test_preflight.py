"""What keeps ranks from working together, as sentences: pinned word for word."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_serve.cluster.control.messages import Examine, Examined, FileMark, Hello, Order, Report
from moe_serve.cluster.control.probe import ProbePort, ProbeResult, ProbeTarget
from moe_serve.cluster.members.preflight import (
    ExpectedRank,
    PreflightRound,
    RankReport,
    examine,
    find_problems,
    versions,
)

ROOT = Path(__file__).resolve().parents[3]
CONFIG = FileMark(name="config.json", size=700, digest="ab" * 32)
WEIGHTS = FileMark(name="model-00001.safetensors", size=4096, digest="cd" * 32)
VERSIONS = {"moe-serve": "0.1.0", "torch": "2.13.0"}
COORDINATOR = RankReport(
    name="the coordinator", host="10.0.0.1", versions=VERSIONS, files=(CONFIG, WEIGHTS)
)
NODES = {"attention-0": "node-a", "expert-0": "node-b", "expert-1": "node-b", "expert-2": "node-c"}
EXPECTED = [ExpectedRank(name=name, node=node) for name, node in NODES.items()]
REPORTS = [
    replace(COORDINATOR, name=name, host=f"10.0.0.{i}") for i, name in enumerate(NODES, start=2)
]


def told(reports: list[RankReport]) -> list[str]:
    return [str(problem) for problem in find_problems(EXPECTED, reports, COORDINATOR, 30)]


def test_ranks_that_fit_have_no_problem() -> None:
    assert told(REPORTS) == []


def test_ranks_that_never_came_by_node() -> None:
    assert told(REPORTS[:2]) == [
        "1 of the 2 ranks of node-b reported within 30 s; missing: expert-1.",
        "no rank of node-c reported within 30 s: expert-2.",
    ]


def test_ranks_of_another_layout_and_doubles() -> None:
    stranger = replace(REPORTS[0], name="expert-7")
    assert told([*REPORTS, stranger, replace(REPORTS[1], host="10.0.0.9")]) == [
        "expert-0 reported 2 times, from 10.0.0.3, 10.0.0.9: start each rank only once.",
        "expert-7 reported from 10.0.0.2, but is not part of this layout.",
    ]


def test_versions_that_differ() -> None:
    old = {"moe-serve": "0.1.0", "torch": "2.11.0"}
    reports = [REPORTS[0], *(replace(report, versions=old) for report in REPORTS[1:3])]
    reports.append(replace(REPORTS[3], versions={"moe-serve": "0.1.0"}))
    assert told(reports) == [
        "torch is 2.11.0 on expert-0, expert-1, but 2.13.0 on the coordinator.",
        "torch is missing on expert-2, but 2.13.0 on the coordinator.",
    ]


def test_files_that_differ_name_file_ranks_and_both_hashes() -> None:
    other = FileMark(name=WEIGHTS.name, size=4096, digest="ef" * 32)
    extra = FileMark(name="model-00002.safetensors", size=8, digest="00" * 32)
    reports = [
        REPORTS[0],
        replace(REPORTS[1], files=(CONFIG, other)),
        replace(REPORTS[2], files=(CONFIG, other, extra)),
        replace(REPORTS[3], files=(WEIGHTS,)),
    ]
    ours = "has 4096 bytes with hash cdcdcdcdcdcd on the coordinator."
    assert told(reports) == [
        "the checkpoint's file config.json is missing on expert-2, but "
        "has 700 bytes with hash abababababab on the coordinator.",
        "the checkpoint's file model-00001.safetensors has 4096 bytes with hash efefefefefef on "
        f"expert-0, expert-1, but {ours}",
        "the checkpoint's file model-00002.safetensors has 8 bytes with hash 000000000000 on "
        "expert-1, but is missing on the coordinator.",
    ]


def test_ports_that_are_closed() -> None:
    first = ProbeTarget("attention-0", "10.0.0.2", 40001)
    second = ProbeTarget("expert-0", "10.0.0.3", 40002)
    refused, silent = "Connection refused", "no answer within 2.0 s (a firewall?)"
    reports = [
        replace(REPORTS[0], probes=(ProbeResult(second, refused),)),
        replace(REPORTS[1], probes=(ProbeResult(first, None),)),
        replace(REPORTS[2], probes=(ProbeResult(first, silent), ProbeResult(second, refused))),
        REPORTS[3],
    ]
    assert told(reports) == [
        "none of attention-0 (10.0.0.2), expert-1 (10.0.0.4) can reach expert-0 on 10.0.0.3 port "
        "40002: Connection refused.",
        "expert-1 (10.0.0.4) cannot reach attention-0 on 10.0.0.2 port 40001: "
        "no answer within 2.0 s (a firewall?).",
    ]


def test_a_firewall_before_a_port_that_its_own_rank_reaches() -> None:
    """Every rank tries its own, too. It is the example of the manual."""
    target, refused = ProbeTarget("expert-0", "10.0.0.3", 40002), "Connection refused"
    failures = (refused, None, refused)  # of attention-0, expert-0, expert-1
    reports = [
        replace(report, probes=(ProbeResult(target, failure),))
        for report, failure in zip(REPORTS, failures, strict=False)
    ]
    (sentence,) = told([*reports, REPORTS[3]])
    assert sentence == (
        "attention-0 (10.0.0.2), expert-1 (10.0.0.4) cannot reach expert-0 on 10.0.0.3 port 40002: "
        "Connection refused."
    )
    assert sentence in (ROOT / "docs" / "internals" / "cluster-control.md").read_text("utf-8")


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
    assert texts == ["no rank of node 1 reported within 5 s: expert-0."]
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
