"""Starts, watches and kills the worker processes of this machine, and leaves none behind.

Each has its own session, so Ctrl-C in the terminal reaches only the parent, which then ends them in
order. `end_with_parent` covers a parent that died before it could.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moe_serve.child_python import module_command
from moe_serve.cluster.members.output_pump import Output, OutputPump
from moe_serve.config.logs import RANK_LOG, is_json_log
from moe_serve.errors import ClusterError

_log, _ranks_log = logging.getLogger(__name__), logging.getLogger(RANK_LOG)

WORKER_MODULE = "moe_serve.cluster.ranks.rank_worker"
STACKS_SIGNAL = signal.SIGUSR1  # signal at which a worker writes its threads' stacks
_STACKS_WAIT_S = 0.5  # until the stacks have arrived
_KILLED_WAIT_S = 10.0  # after SIGKILL; only a process stuck in the kernel takes longer
_LAST_WORDS_S = 1.0  # for output of a dead process that is still in the pipe
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1


def worker_command(*arguments: str) -> tuple[str, ...]:
    """Returns the command that runs the worker in this Python. Secrets go through the
    environment."""
    return module_command(WORKER_MODULE, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitedProcess:
    """A process that ended. `returncode` is minus the signal number if a signal ended it."""

    name: str
    pid: int
    returncode: int
    tail: tuple[str, ...]  # its last lines of output

    @property
    def reason(self) -> str:
        """Describes the end of the process as the end of a sentence: "was killed by SIGKILL"."""
        if self.returncode >= 0:
            return f"ended with status {self.returncode}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-self.returncode).name}"
        return f"was killed by signal {-self.returncode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningRank:
    process: subprocess.Popen[bytes]
    output: Output


def write_to_stderr(line: str) -> None:
    """The default sink: writes the line as it is, or as a record if the log is JSON.

    A terminal that is gone is no reason to stop reading the workers, so its errors are ignored.
    """
    if is_json_log():
        _ranks_log.info("%s", line)
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


class LocalProcesses:
    """The worker processes of this machine. Any thread may call it. `close`, or leaving the `with`
    block, kills the processes that still run.
    """

    def __init__(self, sink: Callable[[str], None] = write_to_stderr) -> None:
        self._pump = OutputPump(sink)
        self._lock = threading.Lock()
        self._running: dict[str, _RunningRank] = {}
        # Linux sends the parent's death signal when the *thread* that forked ends, so one
        # long-lived thread forks.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker-starter")

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of started processes not yet returned by `exited`, `kill` or
        `stop_all`."""
        with self._lock:
            return tuple(self._running)

    def pid(self, name: str) -> int | None:
        with self._lock:
            running = self._running.get(name)
            return running.process.pid if running else None

    def stacks(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Asks workers for their threads' stacks; returns the last lines of each one's output.

        Name only workers that already listen for the signal: it ends others.
        """
        with self._lock:  # none is reaped meanwhile
            asked = {name: self._running[name] for name in names if name in self._running}
            for item in asked.values():
                _signal(item.process, STACKS_SIGNAL)
        time.sleep(_STACKS_WAIT_S)
        return {name: item.output.tail for name, item in asked.items()}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        num_threads: int,
    ) -> int:
        """Starts `name` and returns its pid; raises ClusterError.

        `environment` is added to ours. `num_threads` becomes OMP_NUM_THREADS, before anything in
        the worker can start a thread pool.
        """
        variables = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # keeps the last output of a killed worker
            "OMP_NUM_THREADS": str(num_threads),
            **environment,
        }
        with self._lock:
            assert name not in self._running, f"{name} runs already"
            try:
                process = self._starter.submit(_start, command, variables).result()
            except OSError as error:
                raise ClusterError(
                    f"cannot start {name} ({command[0]}): {error.strerror or error}."
                ) from error
            assert process.stdout is not None, "its output is a pipe"
            output = self._pump.add(name, os.dup(process.stdout.fileno()))
            process.stdout.close()
            self._running[name] = _RunningRank(process=process, output=output)
            return process.pid

    def exited(self) -> list[ExitedProcess]:
        """Returns processes that ended by themselves (or by an outside signal), each of them
        once."""
        with self._lock:
            ended = [name for name, item in self._running.items() if _has_ended(item.process)]
            taken = [(name, self._running.pop(name)) for name in ended]
        until = time.monotonic() + _KILLED_WAIT_S
        return [_bury(name, item, until) for name, item in taken]

    def kill(self, name: str) -> ExitedProcess | None:
        """Sends SIGKILL to the process and its children, even if it is stopped; waits for its
        end.

        Returns None if there is no such process any more. Raises ClusterError if it does not end.
        """
        with self._lock:
            running = self._running.pop(name, None)
        if running is None:
            return None
        return _bury(name, running, time.monotonic() + _KILLED_WAIT_S)

    def stop_all(self, timeout_s: float) -> list[ExitedProcess]:
        """Sends SIGTERM to all, and SIGKILL to those that still run after `timeout_s`.

        A process that does not end even so is logged, and does not keep the others from ending.
        """
        with self._lock:
            stopping, self._running = self._running, {}
        for item in stopping.values():
            _signal(item.process, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while not all(_has_ended(item.process) for item in stopping.values()):
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        for item in stopping.values():  # kill all, then wait for each
            _kill_group(item.process)
        until = time.monotonic() + _KILLED_WAIT_S
        ended = []
        for name, item in stopping.items():
            try:
                ended.append(_bury(name, item, until))
            except ClusterError as error:
                _log.error("%s", error)
        return ended

    def close(self) -> None:
        self.stop_all(0)
        self._starter.shutdown()
        self._pump.close()


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # end of file tells the worker that we are gone
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Checks for the end without reaping, where the system allows it, so that the pid and the group
    stay reserved.
    """
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal without reaping an ended process, as Popen would do."""
    if not _has_ended(process):
        with contextlib.suppress(ProcessLookupError):  # if the check above has reaped it
            os.kill(process.pid, number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGKILL to the process, if it still runs, and to the children it left."""
    if process.returncode is None:  # not reaped
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _bury(name: str, running: _RunningRank, until: float) -> ExitedProcess:
    """Ends the rest of a process and its children, reaps it and closes its pipes."""
    process = running.process
    _kill_group(process)
    assert process.stdin is not None, "its input is a pipe"
    process.stdin.close()
    try:
        returncode = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{name} (pid {process.pid}) does not end {_KILLED_WAIT_S:g} s after SIGKILL; it is "
            "stuck in the kernel (a device or a network file system that does not answer)."
        ) from error
    running.output.has_ended.wait(_LAST_WORDS_S)
    return ExitedProcess(
        name=name, pid=process.pid, returncode=returncode, tail=running.output.tail
    )


def end_with_parent() -> None:
    """Ends a worker when the process that started it ends, however that happens.

    Call this first in a worker that LocalProcesses started; without a pipe it does nothing. The
    worker's standard input is a pipe whose other end only the parent holds, so end of file means
    that the parent is gone. On Linux the kernel also sends SIGKILL, which reaches a worker that is
    stopped, or whose threads never return to Python.

    It also notices a parent that died before the call: the pipe is at end of file then.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        number = ctypes.c_ulong(signal.SIGKILL)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    threading.Thread(target=_wait_for_the_end, name="parent-watch", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 4096):
        pass  # nothing is written here, and only end of file matters
    os.kill(os.getpid(), signal.SIGKILL)
