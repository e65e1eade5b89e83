"""Which KV pages are free and who holds the others. Page 0 is the empty page: never handed out.

Knows page numbers only, not what is in them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class PagePool:
    """Pages 1 .. num_pages, each free or held by one or more owners (reference count)."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool needs a page, got {num_pages}"
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._references = array("q", bytes(8 * (num_pages + 1)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more owner for a page that has one."""
        assert self._references[page] > 0, f"page {page} is free and cannot be shared"
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Give up one reference to each page; returns those that became free."""
        freed = []
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was released more often than held"
            if self._references[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed

    def references(self) -> NDArray[np.int64]:
        """The reference count of every page, from page 0 on; a copy."""
        return np.array(self._references, dtype=np.int64)

    def check_integrity(self, tables: Iterable[Sequence[int] | NDArray[np.int64]]) -> None:
        """Every page is free once, or held exactly as often as the owners' tables name it."""
        size = self.num_pages + 1
        named = [np.asarray(table, dtype=np.int64) for table in tables]
        held = np.bincount(np.concatenate([np.empty(0, np.int64), *named]), minlength=size)
        free = np.bincount(np.array(self._free, dtype=np.int64), minlength=size)
        assert free.max() <= 1, "a page is on the free list twice"
        assert held[0] == 0 and free[0] == 0, "the empty page is in a table"
        recorded = self.references()
        wrong = np.flatnonzero(held != recorded).tolist()
        assert not wrong, (
            f"page {wrong[0]}: held {held[wrong[0]]} times, recorded {recorded[wrong[0]]}"
        )
        torn = (1 + np.flatnonzero((free[1:] == 1) != (held[1:] == 0))).tolist()
        assert not torn, f"page {torn[0]}: free and held disagree"
