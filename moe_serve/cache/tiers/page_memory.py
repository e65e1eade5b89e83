"""Memory for copies of pages, separate from that of the allocator.

The allocator keeps freed memory, so pages that once waited for a disk would take memory for ever.
This memory goes back to the system.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
from numpy.typing import NDArray


def anonymous_memory(count: int, num_bytes: int) -> NDArray[np.uint8]:
    """Returns zeros, [count, num_bytes], that the system gets back with the last view of them."""
    if not count:
        return np.empty((0, num_bytes), dtype=np.uint8)
    return np.frombuffer(_private(count * num_bytes), dtype=np.uint8).reshape(count, num_bytes)


def _private(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class PageBuffers:
    """Memory of a fixed number of pages. Any thread may call it."""

    def __init__(self, count: int, page_bytes: int) -> None:
        self._map = _private(count * page_bytes)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._rows = self._bytes.reshape(count, page_bytes)
        self._num_used = 0  # rows that were handed out since the memory was given back
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self) -> NDArray[np.uint8]:
        """Returns memory for a page, [page_bytes]. If all of it is in use, the memory comes from
        the allocator.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._num_used < len(self._rows):
                self._num_used += 1
                row: NDArray[np.uint8] = self._rows[self._num_used - 1]
                return row
        return np.empty(self._rows.shape[1], dtype=np.uint8)

    def give_back(self, page: NDArray[np.uint8]) -> None:
        """Takes back memory that `take` returned. Other memory is ignored."""
        if page.base is self._bytes:
            with self._lock:
                self._free.append(page)

    @property
    def is_used(self) -> bool:
        """Returns whether `trim` could give memory to the system, now or later."""
        return self._num_used > 0

    def trim(self) -> None:
        """Gives the memory to the system, if no page is in it."""
        with self._lock:
            if self.is_used and len(self._free) == self._num_used:
                if hasattr(mmap, "MADV_DONTNEED"):
                    self._map.madvise(mmap.MADV_DONTNEED)
                self._free, self._num_used = [], 0
