"""A rank is lost at every phase of its life, in threads: tokens stay those of one process."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experts.expert_stage import ExpertStage
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cluster.members import membership as membership_module
from moe_serve.cluster.ranks.expert_rank import ExpertRank
from moe_serve.cluster.ranks.mirror import Mirrors
from moe_serve.cluster.ranks.rank_worker import Worker
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.opened_model import model_folder
from moe_serve.engine.request.request import FinishReason, GenerationRequest
from moe_serve.model.load.loader import ModelLoader
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.rank_services import RankServices
from moe_serve.pipeline.links import data_group
from tests.support.cluster.fault_drive import (
    DEADLINE_S,
    OF,
    VOCAB_SIZE,
    WANTED,
    FaultDrive,
    assert_recovers,
    driven,
    fault_config,
    undisturbed,
)
from tests.support.cluster.fault_starter import Faults, FaultStarter, no_message
from tests.support.cluster.layouts import Answer, requests


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return undisturbed(OF, WANTED)


@pytest.fixture(scope="module")
def shared() -> Iterator[FaultDrive]:
    with pytest.MonkeyPatch.context() as patch, driven(Faults(patch)) as (drive, _):
        yield drive


@pytest.fixture
def drive(shared: FaultDrive) -> FaultDrive:
    """2A3E with everybody there, also after the test before, whose losses are forgotten."""
    shared.wait_until_complete()
    for state in shared.membership.roster.all():
        state.num_failures = 0
    return shared


_numbers = itertools.count()


@pytest.fixture
def wanted() -> list[GenerationRequest]:
    """WANTED, for which nothing is cached yet."""
    salt = f"test {next(_numbers)}"
    return [replace(request, cache_salt=salt) for request in WANTED]


@pytest.mark.parametrize(
    ("rank", "owner", "function", "nth"),
    [
        ("expert-1", ExpertLoop, "_arrived", 4),
        ("expert-0", ExpertLoop, "_serve", 9),
        ("expert-2", ExpertLoop, "_send", 5),
        ("expert-1", ExpertRank, "handle", 6),
        ("attention-1", GroupTransport, "send_frames", 4),
        ("attention-0", GroupTransport, "await_frames", 12),
        ("attention-1", GroupTransport, "begin", 3),
        ("attention-0", Mirrors, "update", 4),
        ("attention-1", Mirrors, "append", 2),
        ("attention-0", KVCache, "finite", 1),
        ("attention-0", KVCache, "finite", 2),
    ],
)
def test_killed_in_a_step(
    faults: Faults,
    drive: FaultDrive,
    wanted: list[GenerationRequest],
    expected: dict[str, Answer],
    rank: str,
    owner: type,
    function: str,
    nth: int,
) -> None:
    faults.at(owner, function, faults.die, rank=rank, time=nth)
    assert_recovers(drive, expected, num_lost=1, wanted=wanted)
    assert len(faults.happened) == 1


@pytest.mark.parametrize(
    ("rank", "owner", "function", "nth"),
    [
        ("expert-1", ExpertRank, "_take", 1),  # it was to take over
        ("expert-1", data_group, "meet", 1),
        ("attention-1", data_group, "meet", 1),
        ("attention-0", Worker, "_join", 1),
        ("expert-0", ExpertRank, "__init__", 1),  # restarted, it loads
        ("expert-0", data_group, "meet", 1),  # restarted, it joins
        ("expert-2", ExpertLoop, "_serve", 4),  # in the same layer
    ],
)
def test_another_one_while_the_first_is_overcome(
    faults: Faults,
    drive: FaultDrive,
    wanted: list[GenerationRequest],
    expected: dict[str, Answer],
    rank: str,
    owner: Any,
    function: str,
    nth: int,
) -> None:
    faults.at(ExpertLoop, "_serve", faults.die, rank="expert-0", time=4)
    faults.at(owner, function, faults.die, rank=rank, time=nth)
    start, num_lost = time.monotonic(), drive.membership.num_lost
    assert_recovers(drive, expected, wanted=wanted)
    assert drive.membership.num_lost == num_lost + 2
    assert time.monotonic() - start < DEADLINE_S
    assert len(faults.happened) == 2


@pytest.mark.parametrize("rank", ["expert-0", "attention-0"])
def test_the_only_one_is_killed_in_a_step(
    faults: Faults, expected: dict[str, Answer], rank: str
) -> None:
    owner = GroupTransport if rank == "attention-0" else ExpertLoop
    function = "await_frames" if rank == "attention-0" else "_serve"
    faults.at(owner, function, faults.die, rank=rank, time=8)
    with driven(faults, fault_config(1, 1)) as (drive, _):
        assert_recovers(drive, expected, num_lost=1)


def test_no_room_for_a_takeover(
    faults: Faults,
    drive: FaultDrive,
    wanted: list[GenerationRequest],
    expected: dict[str, Answer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rank that cannot take more experts stays; requests wait for the one that has them."""
    faults.at(ExpertLoop, "_serve", faults.die, rank="expert-0", time=4)
    faults.at(ModelLoader, "expert_bank", faults.fail, rank="expert-1", time=None)
    assert_recovers(drive, expected, num_lost=1, wanted=wanted)
    assert "expert-1 could not take over experts" in caplog.text


@pytest.mark.parametrize(
    ("rank", "owner", "function", "nth"),
    [
        ("expert-1", ExpertStage, "partial", 7),
        ("attention-1", GroupTransport, "await_frames", 40),
        ("attention-0", LocalExecutor, "run", 3),
    ],
)
def test_a_rank_that_raises(
    faults: Faults,
    drive: FaultDrive,
    wanted: list[GenerationRequest],
    expected: dict[str, Answer],
    rank: str,
    owner: type,
    function: str,
    nth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is lost: what failed is computed again, alone. Experts are multiplied in parts, as
    where they are in several banks."""
    monkeypatch.setattr(RankServices, "serve", lambda *_: None)
    faults.at(owner, function, faults.fail, rank=rank, time=nth)
    assert_recovers(drive, expected, num_lost=0, wanted=wanted)
    assert len(faults.happened) == 1


@pytest.mark.parametrize(
    ("rank", "owner", "function"),
    [("expert-1", ExpertLoop, "_serve"), ("attention-1", GroupTransport, "await_frames")],
)
def test_a_stale_rank_that_wakes(
    faults: Faults, expected: dict[str, Answer], rank: str, owner: type, function: str
) -> None:
    """It froze in a step, no signal reaches it, and the others went on without it: what it still
    sends goes to connections that are closed, and it ends."""
    faults.at(owner, function, faults.freeze, rank=rank, time=6)
    with driven(faults, fault_config(2, 3, heartbeat_s=0.5, timeout_s=1.0)) as (drive, starter):
        starter.can_kill = False
        stale = next(t for t in starter._threads if t.name == rank)
        assert drive.serve(WANTED) == expected, "a token changed"
        assert faults.num_frozen == 1 and stale.is_alive() and rank in drive.hurt.detected
        faults.thawed.set()
        assert drive.serve(WANTED) == expected, "the stale rank changed a token"
        stale.join(DEADLINE_S)
        assert not stale.is_alive(), "it ends"
        drive.wait_until_complete()
        assert drive.serve(WANTED) == expected


def test_malformed_frames_are_dropped(
    drive: FaultDrive,
    wanted: list[GenerationRequest],
    expected: dict[str, Answer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    starter, num_lost = drive.membership._starter, drive.membership.num_lost
    assert isinstance(starter, FaultStarter)
    for name in ("expert-1", "attention-0"):
        starter.garble(name, no_message() * 3)
    assert drive.serve(wanted) == expected
    link = drive.state("expert-1").link
    assert link is not None and link.num_malformed == 3
    assert drive.membership.num_lost == num_lost
    assert "expert-1 sent frames that are not valid messages" in caplog.text
    starter.garble("expert-1", b"\xff" * 64)  # no frame can be that long
    assert_recovers(drive, expected, num_lost=1, wanted=wanted)


def test_a_request_that_ends_every_rank_ends_itself(
    faults: Faults,
    drive: FaultDrive,
    wanted: list[GenerationRequest],
    expected: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership_module, "_FIRST_PAUSE_S", 0.01)
    is_armed = [True]

    def die_if_armed() -> None:
        if is_armed[0]:
            faults.die()

    for rank in ("attention-0", "attention-1"):
        faults.at(GroupTransport, "send_frames", die_if_armed, rank=rank, time=None)
    (answer,) = drive.serve(wanted[:1]).values()
    assert answer.end is FinishReason.ERROR and answer.error is not None
    assert "attention ranks were lost" in answer.error, answer.error
    is_armed[0] = False
    drive.wait_until_complete()
    assert drive.serve(wanted) == expected


def test_another_checkpoint_is_refused(
    faults: Faults, expected: dict[str, Answer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files change while the server runs: a rank that is started again is not let in."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder(OF.model), folder)
    of = fault_config(2, 3)
    of = replace_path(of, folder)
    file = next(iter(sorted(folder.glob("*.safetensors"))))
    with driven(faults, of) as (drive, starter):
        drive.wait_until_complete()
        content = file.read_bytes()
        put(file, content[:-1] + bytes([content[-1] ^ 1]))
        starter.crash("expert-1")
        assert drive.serve(WANTED) == expected, "the others hold the right one"
        step_until(drive, lambda: "expert-1 is lost: its checkpoint differs" in caplog.text)
        assert drive.serve(WANTED) == expected
        put(file, content)
        drive.wait_until_complete()
        assert drive.serve(WANTED) == expected


def put(file: Path, content: bytes) -> None:
    """Replaces a checkpoint's file. Ranks map the old one: to write into it would end this process
    with a bus error if one reads just then."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


def replace_path(of: EngineConfig, folder: Path) -> EngineConfig:
    return replace(of, model=replace(of.model, path=str(folder)))


def step_until(drive: FaultDrive, is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < end, "never"
        drive.engine.step()


@pytest.mark.parametrize("phase", ["step", "meeting"])
def test_the_servers_end_waits_for_no_frozen_rank(faults: Faults, phase: str) -> None:
    """Its connections are there, its node or cable is not; every other wait would take a minute."""
    if phase == "step":
        faults.at(ExpertLoop, "run", faults.freeze, rank="expert-0", time=5)
    else:
        faults.at(Worker, "_join", faults.freeze, rank="attention-0", time=2)
    of = fault_config(1, 2, heartbeat_s=60.0, timeout_s=60.0)
    with driven(faults, of) as (drive, starter):
        is_closing = threading.Event()

        def step() -> None:
            for request in requests(4, VOCAB_SIZE, num_tokens=200):
                drive.engine.add(request)
            while not is_closing.is_set():
                drive.engine.step()

        engine = threading.Thread(target=step)
        engine.start()
        if phase == "meeting":
            while drive.coordinator.epoch.number == 0:
                time.sleep(0.01)
            starter.crash("expert-1")
        while not faults.num_frozen:
            time.sleep(0.01)
        is_closing.set()
        drive.engine.stop_waiting()
        engine.join(30)
        is_over = not engine.is_alive()
        faults.thawed.set()
        engine.join()
        assert is_over, "the step went on"
        assert not [name for name in drive.hurt.detected if name != "expert-1"], "nobody is blamed"
