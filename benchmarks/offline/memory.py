"""Memory of a process and its descendants: some engines keep theirs in a child."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass(slots=True)
class TreeMemory:
    """The largest resident sizes of the tree below `pid`, as often as `look` is called.

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
