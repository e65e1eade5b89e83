"""Watches files that may change while the server runs: API keys and certificates."""

from __future__ import annotations

import os
from collections.abc import Iterable

# distinguishes versions of a file; None: the file does not exist
Mark = tuple[int, int, int] | None


class FileWatch:
    """Detects changes of files by name, size and time. It follows links."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._marks = self._look()

    def has_changed(self) -> bool:
        """Returns True if a file has changed since the last call, or since the watch was
        created."""
        before, self._marks = self._marks, self._look()
        return before != self._marks

    def _look(self) -> tuple[Mark, ...]:
        return tuple(_mark(path) for path in self._paths)


def _mark(path: str) -> Mark:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
