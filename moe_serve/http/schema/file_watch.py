"""Files that may change while the server runs: keys and certificates."""

from __future__ import annotations

import os
from collections.abc import Iterable

Mark = tuple[int, int, int] | None  # what tells one version of a file from another; None: no file


class FileWatch:
    """Looks at names, sizes and times only. A link is followed: what it points to counts."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._marks = self._look()

    def has_changed(self) -> bool:
        """Since the last call, or since the watch was made."""
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
