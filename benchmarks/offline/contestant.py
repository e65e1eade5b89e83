"""Controls an engine in a separate process: starts it, gives it turns, and ends it.

With a process of its own, neither memory, thread pools nor caches of one engine help another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .job import Answer, Job, Ready, Turn

_LIMIT_S = 600.0  # of one answer, loading included
_END_LIMIT_S = 20.0


class ContestantError(RuntimeError):
    """Raised if the engine failed or did not answer; the message is its last output."""


class Contestant:
    """An engine in a separate process; `command` starts a program that speaks the protocol of
    `worker`.

    The process leads a group of its children. The group is stopped while it has nothing to answer,
    because an engine that polls for work would take processor time from the engine whose turn it
    is. The process has no session of its own, so that the system ends it if we are killed first.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the contestant)
        self._started = time.monotonic()
        self._unread = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            env=environment,
            preexec_fn=os.setpgrp,
        )
        self.memory = TreeMemory(self._process.pid)

    def make(self, job: Job) -> tuple[Ready, float]:
        """Loads the model. Returns its facts, and the seconds since the process was started."""
        ready = Ready(**self._ask(asdict(job)))
        load_s = time.monotonic() - self._started
        self._pause()
        return ready, load_s

    def generate(self, turn: Turn) -> Answer:
        self._signal(signal.SIGCONT)
        answer = Answer(**self._ask(asdict(turn)))
        self._pause()
        return answer

    def close(self) -> None:
        """Closes the input, which asks the process to end; after a while its group is killed
        with all children.
        """
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _pause(self) -> None:
        self.memory.look()
        self._signal(signal.SIGSTOP)

    def _signal(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # the group has ended
            os.killpg(self._process.pid, which)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContestantError(self._last_words()) from None
        reply: dict[str, Any] = json.loads(self._read_line())
        return reply

    def _read_line(self) -> bytes:
        """Returns the next line, and checks from time to time whether the process still runs."""
        assert self._process.stdout is not None, "it is a pipe"
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + _LIMIT_S
        while b"\n" not in self._unread:
            is_readable, _, _ = select.select([pipe], [], [], 0.5)
            if is_readable:
                read = os.read(pipe, 1 << 20)
                if not read:
                    raise ContestantError(self._last_words())
                self._unread += read
            elif self._process.poll() is not None:
                raise ContestantError(self._last_words())
            elif time.monotonic() > deadline:
                raise ContestantError(f"no answer in {_LIMIT_S:.0f} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """Returns the signal that ended the process, or the last error that it printed."""
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if code < 0:
            last = f" after {lines[-1].strip()!r}" if lines else ""
            return f"ended by {signal.Signals(-code).name}{last}"
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [f"exit code {code}"])[-1].strip()


@dataclass(slots=True)
class TreeMemory:
    """The largest resident sizes of the processes below `pid`, updated by each call of `look`.

    All processes are summed, because some engines keep their memory in a child. The kernel keeps
    the largest size of each process, so only processes that start and end between two calls are
    missed. Shared pages count once per process.
    """

    pid: int
    _peaks: dict[int, int] = field(default_factory=dict)  # pid -> bytes

    def look(self) -> None:
        for process in self._tree():
            peak = _peak_bytes(process)
            self._peaks[process.pid] = max(peak, self._peaks.get(process.pid, 0))

    @property
    def peak_bytes(self) -> int:
        """Returns the sum of the largest resident sizes of all processes."""
        return sum(self._peaks.values())

    def proportional_bytes(self) -> int:
        """Returns the present memory; a page that n processes share counts as 1/n in each (PSS,
        on Linux).
        """
        total = 0
        for process in self._tree():
            try:
                total += getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss
            except psutil.Error:  # it has ended
                continue
        return total

    def _tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _peak_bytes(process: psutil.Process) -> int:
    """Returns Linux's VmHWM; on other systems the present size."""
    with contextlib.suppress(OSError):  # no such file system, or the process has ended
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
