"""Ranks as processes, killed and frozen under eight streams: no request fails, no token changes.

Each test prints when the fault was detected and when tokens came again (`pytest -s`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.cluster.fault_drive import DEADLINE_S, FaultDrive, fault_config, undisturbed
from tests.support.cluster.layouts import Answer, requests

pytestmark = pytest.mark.timeout(400)  # processes start again and again
VOCAB_SIZE = 4096  # of the demonstration model
DETECTED_S, SERVING_S = 1.0, 5.0  # what a kill may take, with the demonstration model
OF = fault_config(2, 3, heartbeat_s=1.5)
WANTED = requests(8, VOCAB_SIZE, num_tokens=30)


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return undisturbed(OF, WANTED)


@pytest.fixture(scope="module")
def shared() -> Iterator[FaultDrive]:
    with FaultDrive(OF) as drive:
        yield drive


@pytest.fixture
def drive(shared: FaultDrive) -> FaultDrive:
    """2A3E with everybody there, also after the test before."""
    shared.wait_until_complete()
    return shared


def tell(capsys: pytest.CaptureFixture[str], what: str, drive: FaultDrive) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {what}: {drive.hurt}")


def assert_told_by_its_end(drive: FaultDrive, victim: str) -> None:
    """The kernel closes its connections, and its parent hears of it: nobody waits for silence."""
    assert drive.hurt.detected[victim] < DETECTED_S
    why = drive.hurt.whys[victim]
    assert "has closed the connection" in why or "SIGKILL" in why or "reset" in why, why


def assert_ended(pid: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < end, f"process {pid} is still there"


@pytest.mark.parametrize("victim", ["expert-1", "attention-1"])
def test_a_killed_rank(
    drive: FaultDrive,
    expected: dict[str, Answer],
    victim: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pid = drive.pid(victim)
    answers = drive.serve(WANTED, lambda: os.kill(pid, signal.SIGKILL))
    tell(capsys, f"SIGKILL of {victim}", drive)
    assert answers == expected, "a token changed"
    assert drive.hurt.detected.keys() == {victim}
    assert_told_by_its_end(drive, victim)
    assert drive.hurt.served is not None and drive.hurt.served < SERVING_S
    drive.wait_until_complete()
    assert drive.pid(victim) != pid, "it was started again"
    assert drive.serve(WANTED) == expected, "and serves as before"


@pytest.mark.parametrize("victim", ["expert-2", "attention-1"])
def test_a_frozen_rank(
    drive: FaultDrive,
    expected: dict[str, Answer],
    victim: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three heartbeats are missing, and it is killed: waking it is too late."""
    pid = drive.pid(victim)
    answers = drive.serve(WANTED, lambda: os.kill(pid, signal.SIGSTOP))
    tell(capsys, f"SIGSTOP of {victim}", drive)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert_ended(pid)
    assert answers == expected, "a token changed"
    assert drive.hurt.detected.keys() == {victim}
    assert drive.hurt.whys[victim].startswith("silent for ")
    heartbeat_s = OF.cluster.heartbeat_s
    assert 2 * heartbeat_s < drive.hurt.detected[victim] < 3 * heartbeat_s + 0.5, "time to look"
    assert drive.serve(WANTED) == expected


def test_two_at_once(
    drive: FaultDrive, expected: dict[str, Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    victims = ("attention-0", "expert-0")
    pids = [drive.pid(name) for name in victims]

    def hurt() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    answers = drive.serve(WANTED, hurt)
    tell(capsys, "SIGKILL of two at once", drive)
    assert answers == expected, "a token changed"
    assert set(drive.hurt.detected) == set(victims)
    for name in victims:
        assert_told_by_its_end(drive, name)
    assert drive.hurt.served is not None and drive.hurt.served < SERVING_S


def test_killed_while_nothing_runs(drive: FaultDrive, expected: dict[str, Answer]) -> None:
    """Back before anybody asks: its pages and prefixes are others now."""
    num_lost = drive.membership.num_lost
    pids = [drive.pid(name) for name in ("attention-0", "attention-1", "expert-2")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + DEADLINE_S
    while drive.membership.num_lost < num_lost + len(pids):
        assert time.monotonic() < end, "nobody noticed"
        drive.engine.step()
    drive.wait_until_complete()
    assert drive.serve(WANTED) == expected


@pytest.mark.parametrize("victim", ["expert-0", "attention-0"])
def test_the_only_one_of_its_kind(
    expected: dict[str, Answer], victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests wait until it is back."""
    with FaultDrive(fault_config(1, 1)) as drive:
        pid = drive.pid(victim)
        answers = drive.serve(WANTED, lambda: os.kill(pid, signal.SIGKILL))
        tell(capsys, f"SIGKILL of {victim}, the only one", drive)
        assert answers == expected, "a token changed"
        assert_told_by_its_end(drive, victim)
        assert drive.engine.stats().outage_s == 0
