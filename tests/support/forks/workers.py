"""Runs the tests in forks of the process that has collected them.

    python -m pytest --workers 2

Imports and collection take some tens of seconds of a core, and here they happen once. A worker runs
one file after another, so that the shared fixtures of a file are created once. Tests that mostly
wait for processes that they start run in two more workers. A worker that has none of its own kind
left helps with the other kind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import pytest

from tests.support.forks import popen

WAITING = tuple(
    f"tests/{name}/"
    for name in (
        "benchmarks", "cluster", "commands", "dashboard", "planning", "scripts", "security",
        "server",
    )
)  # fmt: skip
_SLOW_FILES = Path(__file__).resolve().parents[2] / "slow_files.txt"
_WAITING_WORKERS = 2
_MOST_WORKERS = 8
_PATIENCE_S = 20.0  # for workers that are interrupted and end their servers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", help="run the tests in so many forks, or auto: one per core")


def pytest_configure(config: pytest.Config) -> None:
    asked = config.option.workers
    if asked is not None:
        auto = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        config.pluginmanager.register(Workers(config, auto if asked == "auto" else int(asked)))


@dataclass(slots=True, eq=False)
class Worker:
    """A fork, the connection to it, and the tests that it was given and has not finished."""

    name: str
    is_waiting: bool
    pid: int
    connection: Connection
    given: list[int] = field(default_factory=list)
    has_ended: bool = False


class Files:
    """The tests that no worker has yet, by file: first the files that take long."""

    def __init__(self, items: Sequence[pytest.Item], slow: tuple[str, ...]) -> None:
        files = defaultdict[str, list[int]](list)
        for index, item in enumerate(items):
            files[item.nodeid.partition("::")[0]].append(index)
        order = sorted(files, key=lambda file: (not file.startswith(slow), -len(files[file])))
        self._left = {
            kind: [files[file] for file in order if file.startswith(WAITING) == kind]
            for kind in (False, True)
        }

    def take(self, is_waiting: bool) -> list[int]:
        """Returns the tests of the next file for a kind of worker, or none at the end."""
        queue = self._left[is_waiting] or self._left[not is_waiting]
        return queue.pop(0) if queue else []

    def put_back(self, tests: list[int], is_waiting: bool) -> None:
        if tests:
            self._left[is_waiting].insert(0, tests)


class Workers:
    """The plugin of pytest that starts workers, gives them files and shows what they report."""

    def __init__(self, config: pytest.Config, computing: int) -> None:
        self._config = config
        self._computing = computing
        self._workers: list[Worker] = []

    def pytest_report_header(self) -> str:
        return f"workers: {self._computing}, and {_WAITING_WORKERS} for tests that wait"

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or self._config.option.collectonly:
            return None
        self._config.pluginmanager.getplugin("terminalreporter").showfspath = False
        lines = _SLOW_FILES.read_text("utf-8").splitlines()
        slow = tuple(line for line in lines if line.startswith("tests/"))
        self._files = Files(session.items, slow)
        # It is made before the forks, or each would make one.
        self._folder = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for number in range(_WAITING_WORKERS + self._computing):
                self._start(session, number < _WAITING_WORKERS)
            while running := {
                each.connection: each for each in self._workers if not each.has_ended
            }:
                for ready in wait(list(running)):
                    self._hear(session, running[ready])  # type: ignore[index]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
        return True

    def _start(self, session: pytest.Session, is_waiting: bool) -> None:
        ours, theirs = Pipe()
        name = f"w{len(self._workers)}"
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._workers:
                other.connection.close()
            _run_as_worker(session, theirs, self._folder / name, is_waiting)
        theirs.close()
        self._workers.append(Worker(name, is_waiting, pid, ours))

    def _hear(self, session: pytest.Session, worker: Worker) -> None:
        """Handles one message of a worker."""
        hook = self._config.hook
        try:
            kind, content = worker.connection.recv()
        except (EOFError, ConnectionError):
            kind, content = "ended", None
        match kind:
            case "next":
                worker.given = self._files.take(worker.is_waiting)
                worker.connection.send(list(worker.given))
            case "finished":
                worker.given.remove(content)
                item = session.items[content]
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            case "report":
                report = hook.pytest_report_from_serializable(config=self._config, data=content)
                hook.pytest_runtest_logreport(report=report)
            case "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=content)
            case "broken":
                raise RuntimeError(f"A worker failed outside of its tests:\n{content}")
            case _:
                self._bury(session, worker)

    def _bury(self, session: pytest.Session, worker: Worker) -> None:
        """Reports the test that a worker died of, and starts a worker for the rest of its file."""
        _, status = os.waitpid(worker.pid, 0)
        worker.has_ended = True
        if not worker.given:
            if status:
                raise RuntimeError(f"{worker.name} died between tests: status {status}.")
            return
        item = session.items[worker.given[0]]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"The worker died: exit status {os.waitstatus_to_exitcode(status)}.",
            when="call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)
        self._files.put_back(worker.given[1:], worker.is_waiting)
        self._start(session, worker.is_waiting)

    def _end(self) -> None:
        """Interrupts the workers that still run, and waits until they have ended."""
        left = [worker for worker in self._workers if not worker.has_ended]
        for worker in left:
            worker.connection.close()  # one that waits until it can send ends, too
            os.kill(worker.pid, signal.SIGINT)
        deadline = time.monotonic() + _PATIENCE_S
        for worker in left:
            while os.waitpid(worker.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.01)


class _Reports:
    """The plugin in a worker that sends its reports and warnings."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        given = {
            "warning_message": warning_message, "when": when, "nodeid": nodeid,
            "location": location,
        }  # fmt: skip
        self._connection.send(("warning", given))


def _run_as_worker(
    session: pytest.Session, connection: Connection, folder: Path, is_waiting: bool
) -> None:
    """Runs files until there are none, and ends this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _surroundings(session.config, connection, folder, is_waiting):
            try:
                _run_files(session, connection)
            finally:
                session._setupstate.teardown_exact(None)
    except (KeyboardInterrupt, ConnectionError):
        os._exit(2)
    except BaseException:
        connection.send(("broken", traceback.format_exc()))
        os._exit(3)
    os._exit(0)


@contextlib.contextmanager
def _surroundings(
    config: pytest.Config, connection: Connection, folder: Path, is_waiting: bool
) -> Iterator[None]:
    """Gives a worker its own folder, captured output, template of processes and priority."""
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend()
    config.pluginmanager.register(_Reports(config, connection))
    popen.use(popen.Template())
    if not is_waiting:  # these take what the waiting tests leave idle
        os.nice(5)
    yield


def _run_files(session: pytest.Session, connection: Connection) -> None:
    while True:
        connection.send(("next", None))
        tests = connection.recv()
        if not tests:
            return
        for place, index in enumerate(tests):
            item = session.items[index]
            # The session stands for a test of an unknown file: all but its fixtures are torn down.
            following = session.items[tests[place + 1]] if place + 1 < len(tests) else session
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("finished", index))
