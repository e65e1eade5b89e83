"""The parts of all recordings of a folder, the oldest dropped when they are more than a cap.

    traces/20260102-030405/part-000000.safetensors      goes first
    traces/20260102-030405-2/part-000000.safetensors    of the second recording in that second

Only files with such names are ever deleted, and a folder when nothing is left in it.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from routing_predictor.traces.errors import TraceError
from routing_predictor.traces.trace_file import SUFFIX

_RECORDING = re.compile(r"\d{8}-\d{6}(-\d+)?")


@dataclass(frozen=True, slots=True)
class Part:
    """One file."""

    path: Path
    size: int


class CappedParts:
    """Filled by one thread; `num_own` and `num_dropped` are for any."""

    def __init__(self, max_bytes: int, earlier: Iterable[Part] = ()) -> None:
        """`earlier`: parts of other recordings, which count too, the oldest first."""
        self._max_bytes = max_bytes
        self._parts = deque(earlier)
        self._total, self._num_earlier = sum(part.size for part in self._parts), len(self._parts)
        self.num_own = 0  # that are there
        self.num_dropped = 0  # of any recording

    def add(self, path: Path, size: int) -> None:
        """A file was written. The newest stays, whatever its size. Raises TraceError."""
        self._parts.append(Part(path, size))
        self._total += size
        self.num_own += 1
        while len(self._parts) > 1 and self._total > self._max_bytes:
            self._drop(self._parts.popleft())

    def _drop(self, part: Part) -> None:
        try:
            part.path.unlink(missing_ok=True)
        except OSError as error:
            raise TraceError(f"{part.path} cannot be deleted: {error.strerror}") from None
        self._total -= part.size
        self.num_dropped += 1
        if self._num_earlier:
            self._num_earlier -= 1
            with contextlib.suppress(OSError):  # there is more in it
                part.path.parent.rmdir()
        else:
            self.num_own -= 1


def earlier_parts(directory: Path) -> list[Part]:
    """Of the recordings in a folder, as `Tracing` names them, the oldest first. Raises TraceError
    if it cannot be read; what is no folder holds none."""
    if not directory.is_dir():
        return []
    try:
        folders = [each for each in directory.iterdir() if _RECORDING.fullmatch(each.name)]
        folders.sort(key=lambda each: tuple(int(part) for part in each.name.split("-")))
        files = [path for folder in folders for path in sorted(folder.glob(f"part-*{SUFFIX}"))]
    except OSError as error:
        raise TraceError(f"{directory} cannot be read: {error.strerror}") from None
    return [Part(path, _size(path)) for path in files]


def _size(path: Path) -> int:
    """0 for a file that somebody has deleted meanwhile."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
