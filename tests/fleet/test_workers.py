"""Processes that compute side by side: equal plans, errors, and ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from moe_serve.errors import ClusterError, ConfigError
from moe_serve.fleet.demand import demand_of
from moe_serve.fleet.fleet_plan import FleetPlan, plan_fleet
from moe_serve.fleet.offer import read_fleet
from moe_serve.fleet.workers import Workers
from tests.fleet.refusing_task import refuse
from tests.fleet.test_packing import SHAPE, SLO, slots

# A worker imports the module of a task: these tasks are of modules that import little.


@pytest.mark.parametrize("count", [1, 2])
def test_tasks_return_and_raise_as_in_one_process(count: int) -> None:
    with Workers(count) as workers:
        for number in range(5):
            workers.start(f"square {number}", pow, number, 2)
        workers.start("refused", refuse, "it is not possible.")
        workers.start("square 3", refuse, "this name is known")
        assert [workers.result(f"square {n}") for n in (4, 0, 3, 1, 2)] == [16, 0, 9, 1, 4]
        with pytest.raises(ConfigError, match="it is not possible"):
            workers.result("refused")
        assert workers.result("square 4") == 16
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_is_an_error() -> None:
    with Workers(2) as workers:
        workers.start("end", os._exit, 1)
        with pytest.raises(ClusterError, match="one of 2 processes was killed"):
            workers.result("end")


def test_a_plan_is_the_same_in_one_process_and_in_two() -> None:
    """Interrupts, which also reach the processes that compute, are left to the process that
    asked."""
    offers = read_fleet("h100:4@2.50,h20:4@0.90", SHAPE, None)
    wanted = demand_of(slots(60, 60.0), 0, SLO, 0.9, shares_prefixes=True)
    messages: list[list[str]] = [[], []]
    num_interrupted = 0

    def interrupt(message: str) -> None:
        nonlocal num_interrupted
        messages[1].append(message)
        for process in multiprocessing.active_children() if "simulating" in message else ():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            num_interrupted += 1

    one = plan_fleet(offers, wanted, 4, messages[0].append, 1)
    two = plan_fleet(offers, wanted, 4, interrupt, 2)
    assert num_interrupted >= 2 * 4
    assert messages[0] == messages[1] and one.points == two.points
    assert _figures(one) == _figures(two) and len(one.certified) > 4
    kinds = [group.kind for each in two.certified for group in each.fleet.groups]
    assert all(kind.offer in offers for kind in kinds), "the caller's own"


def _figures(plan: FleetPlan) -> list[object]:
    done = [*plan.certified, plan.one_device]
    return [(x.fleet.name, x.summary, x.meets, x.late_role) for x in done if x is not None]


def test_ctrl_c_ends_all_processes_without_a_traceback() -> None:
    """The two processes have tasks, and may import still: the test above interrupts them later."""
    command = [
        sys.executable, "-m", "moe_serve", "plan", "--model", "qwen3-30b", "--precision", "fp8",
        "--fleet", "h100:4@2.50", "--request-rate", "20", "--requests", "3000", "--processes", "2",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        assert process.stderr is not None
        said = ""
        while "searching" not in said:
            said = process.stderr.readline()
            assert said, "it ended before it searched"
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 130
    assert "Traceback" not in rest and "Error" not in rest, rest
    end_s = time.monotonic() + 30
    while is_alive(process.pid):
        assert time.monotonic() < end_s, "a process is left"
        time.sleep(0.1)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
