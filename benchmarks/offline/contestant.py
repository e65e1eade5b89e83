"""An engine in its own process, seen from the benchmark: start it, give it turns, end it.

Its own process, so that neither memory, thread pools nor caches of one engine help another.
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
    """The engine failed or did not answer; the message is its last words."""


class Contestant:
    """`command` speaks the protocol of `worker`. The process leads a group of its children.

    The group is stopped while it has nothing to answer: an engine that polls for work would take
    cycles from the one whose turn it is. It is no session of its own, so that the system ends it
    if we are killed before we can.
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
        """Load the model. -> (its facts, seconds since the process was started)."""
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
        """End of input asks it to end; its group is killed after a while, children and all."""
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
        """The next line; looks now and then whether the process still lives."""
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
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [f"exit code {code}"])[-1].strip()


@dataclass(slots=True)
class TreeMemory:
    """The largest resident sizes of the tree below `pid`, as often as `look` is called.

    The tree is summed because some engines keep their memory in a child.

    The kernel keeps each process's own largest size, so nothing is missed between two looks but
    processes that came and went. Pages that processes share count once for each of them.
    """

    pid: int
    _peaks: dict[int, int] = field(default_factory=dict)  # pid -> bytes

    def look(self) -> None:
        for process in self._tree():
            peak = _peak_bytes(process)
            self._peaks[process.pid] = max(peak, self._peaks.get(process.pid, 0))

    @property
    def peak_bytes(self) -> int:
        """The sum over processes of each one's largest resident size."""
        return sum(self._peaks.values())

    def proportional_bytes(self) -> int:
        """Now, with a page that n processes share counted as 1/n in each (Linux: PSS)."""
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
    """From Linux's VmHWM; elsewhere the size now."""
    with contextlib.suppress(OSError):  # no such file system, or the process has ended
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
