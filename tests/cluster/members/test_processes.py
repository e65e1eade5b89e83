"""Worker processes: their ends are told, their last words kept, and nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from moe_serve.child_python import module_command
from moe_serve.cluster.members.output_pump import TAIL_LINES, Output
from moe_serve.cluster.members.processes import ExitedProcess, LocalProcesses, worker_command
from moe_serve.errors import ClusterError

ROOT = Path(__file__).resolve().parents[3]
WAIT = "import time; print('ready', flush=True); time.sleep(600)"
# Says what it was told, then waits; ends only by force.
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAIT
FAIL = "import sys; print('one'); print('two', file=sys.stderr); sys.stderr.write('three'); exit(3)"
LEAVE_A_CHILD = """
import subprocess, sys
child = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(600)"))
print(child.pid)
child.returncode = 0  # no warning that it still runs
"""


def is_running(pid: int) -> bool:
    """A zombie is not; in a container, it may be that nobody reaps it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Started:
    """LocalProcesses whose lines go into a queue."""

    def __init__(self) -> None:
        self.lines: SimpleQueue[str] = SimpleQueue()
        self.processes = LocalProcesses(self.lines.put)

    def run(self, name: str, code: str, **environment: str) -> int:
        command = (sys.executable, "-c", code)
        return self.processes.start(name, command, environment=environment, num_threads=1)

    def wait_for(self, line: str) -> None:
        while (got := self.lines.get(timeout=60)) != line:
            assert "Error" not in got, got

    def wait_exit(self) -> ExitedProcess:
        """The next process that ends by itself. Its line queue is fed until then."""
        while not (exited := self.processes.exited()):
            threading.Event().wait(0.005)
        return exited[0]


@pytest.fixture
def started() -> Iterator[Started]:
    """Checks that no process, descriptor or thread is left afterwards."""
    me = psutil.Process()
    others = me.children(recursive=True)  # of the whole session: a server, a browser
    num_descriptors, num_threads = me.num_fds(), threading.active_count()
    item = Started()
    yield item
    item.processes.close()
    left = [child for child in me.children(recursive=True) if child not in others]
    assert not left, f"processes left, zombies included: {left}"
    assert me.num_fds() <= num_descriptors, "descriptors leaked"
    assert threading.active_count() <= num_threads, "threads leaked"


def test_an_end_is_told_once_with_the_last_words(started: Started) -> None:
    pid = started.run("expert 1", FAIL)
    exited = started.wait_exit()
    assert (exited.name, exited.pid, exited.returncode) == ("expert 1", pid, 3)
    assert sorted(exited.tail) == ["one", "three", "two"]
    assert exited.reason == "ended with status 3"
    assert started.processes.exited() == []
    assert started.processes.names == ()
    prefixed = {started.lines.get(timeout=60) for _ in range(3)}
    assert prefixed == {"[expert 1] one", "[expert 1] two", "[expert 1] three"}


def test_a_name_can_be_started_again(started: Started) -> None:
    started.run("expert 0", FAIL)
    started.wait_exit()
    started.run("expert 0", WAIT)
    started.wait_for("[expert 0] ready")
    assert started.processes.names == ("expert 0",)


def test_kill_reaches_a_stopped_process(started: Started) -> None:
    pid = started.run("expert 0", WAIT)
    started.wait_for("[expert 0] ready")
    os.kill(pid, signal.SIGSTOP)
    exited = started.processes.kill("expert 0")
    assert exited is not None and exited.reason == "was killed by SIGKILL"
    assert not psutil.pid_exists(pid), "it was not reaped"
    assert started.processes.kill("expert 0") is None, "killing twice is fine"


def test_a_strangers_kill_is_told(started: Started) -> None:
    pid = started.run("attention 0", WAIT)
    started.wait_for("[attention 0] ready")
    os.kill(pid, signal.SIGKILL)
    exited = started.wait_exit()
    assert (exited.returncode, exited.tail) == (-signal.SIGKILL, ("ready",))


def test_stop_all_asks_first_and_forces_then(started: Started) -> None:
    started.run("polite", WAIT)
    started.run("stubborn", STUBBORN)
    names = {started.lines.get(timeout=60), started.lines.get(timeout=60)}
    assert names == {"[polite] ready", "[stubborn] ready"}
    codes = {item.name: item.returncode for item in started.processes.stop_all(3.0)}
    assert codes == {"polite": -signal.SIGTERM, "stubborn": -signal.SIGKILL}
    assert started.processes.exited() == [], "an ordered end is no failure"


def test_who_has_ended_already_can_be_stopped_and_asked(started: Started) -> None:
    """A rank that died a moment ago must not keep the others from being ended."""
    pid = started.run("dead", FAIL)
    started.run("alive", WAIT)
    started.wait_for("[alive] ready")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is there to be reaped
    assert started.processes.stacks(["dead"]).keys() == {"dead"}
    codes = {item.name: item.returncode for item in started.processes.stop_all(60.0)}
    assert codes == {"dead": 3, "alive": -signal.SIGTERM}


def test_one_that_is_stuck_in_the_kernel_costs_the_others_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes no signal, so nobody can wait for its end; the one after it is ended and reaped."""
    stuck, other = started.run("stuck", WAIT), started.run("other", WAIT)
    process, wait = started.processes._running["stuck"].process, subprocess.Popen.wait

    def never(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if process.pid == stuck:
            raise subprocess.TimeoutExpired("stuck", timeout or 0.0)
        return wait(process, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", never)
        ended = started.processes.stop_all(0)
    assert [item.name for item in ended] == ["other"]
    assert not psutil.pid_exists(other), "it was not reaped"
    assert f"stuck (pid {stuck}) does not end 10 s after SIGKILL" in caplog.text
    assert process.wait() < 0, "it was not stuck at all"


def test_what_a_worker_leaves_behind_ends_with_it(started: Started) -> None:
    """A compiler, say. It would also hold the output pipe open."""
    started.run("expert 0", LEAVE_A_CHILD)
    child = int(started.wait_exit().tail[0])
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:  # killed, but perhaps not yet gone
        time.sleep(0.005)
    assert not is_running(child), f"the child {child} of a worker that ended still runs"


def test_it_has_its_own_session_and_thread_count(started: Started) -> None:
    code = (
        "import os; environ = os.environ; "
        "print(os.getsid(0) == os.getpid(), environ['OMP_NUM_THREADS'], environ['X'])"
    )
    started.run("a", code, X="y")
    assert started.wait_exit().tail == ("True 1 y",)


def test_many_lines_are_passed_on_and_the_last_are_kept(started: Started) -> None:
    started.run("a", "for i in range(3000): print('line', i)")
    tail = started.wait_exit().tail
    assert tail == tuple(f"line {i}" for i in range(3000 - TAIL_LINES, 3000))
    assert started.lines.qsize() == 3000


def test_a_command_that_does_not_exist(started: Started) -> None:
    with pytest.raises(ClusterError, match=r"cannot start a \(/no/such/python\): No such file"):
        started.processes.start("a", ("/no/such/python",), environment={}, num_threads=1)


def test_a_line_without_end_is_cut() -> None:
    output = Output("a")
    lines = output.feed(b"x" * 20_000)
    lines += output.feed(b"\xff\nlast")
    lines += output.end()
    assert [len(line) for line in lines] == [8192, 8192, 20_000 - 2 * 8192 + 1, 4]
    assert lines[2].endswith("\ufffd"), "bytes that are not UTF-8 must not stop the pump"


def test_the_worker_command_names_the_module() -> None:
    expected = module_command("moe_serve.cluster.ranks.rank_worker", "--rank", "1")
    assert worker_command("--rank", "1") == expected and expected[-2:] == ("--rank", "1")


CHILD = """
import sys, time
from moe_serve.cluster.members.processes import end_with_parent
end_with_parent()
fifo = open(sys.argv[1], "w")  # the test reads its end when we end
print("ready", flush=True)
time.sleep(600)
"""
PARENT = """
import sys, threading
from moe_serve.cluster.members.processes import LocalProcesses
processes = LocalProcesses()
start = lambda: print(processes.start(
    "w", (sys.executable, "-c", sys.argv[1], sys.argv[2]), environment={}, num_threads=1
), flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()  # the worker must not end with the thread that asked for it
sys.stdin.read()
"""


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, id="stopped")])
def test_no_worker_outlives_its_parent(tmp_path: Path, is_stopped: bool) -> None:
    if is_stopped and sys.platform != "linux":
        pytest.skip("only Linux kills a stopped worker with its parent")
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(fifo)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent, fifo.open() as alive:  # opens when the worker does
        assert parent.stdout is not None and parent.stderr is not None
        pid = int(parent.stdout.readline())
        assert parent.stderr.readline() == "[w] ready\n"
        assert psutil.Process(pid).is_running()
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert alive.read() == "", "the worker lives on"
