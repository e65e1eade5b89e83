"""Which KV pages are free and who holds the others. Page 0 is the empty page: never handed out.

Knows page numbers only, not what is in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PagePool:
    """Pages 1 .. num_pages, each free or held by one or more owners (reference count)."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"a pool needs a page, got {num_pages}"
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._references = [0] * (num_pages + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

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

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Every page is free once, or held exactly as often as the owners' tables name it."""
        held = Counter(page for table in tables for page in table)
        assert len(set(self._free)) == len(self._free), "a page is on the free list twice"
        free = set(self._free)
        for page in range(1, self.num_pages + 1):
            counted, recorded = held[page], self._references[page]
            assert counted == recorded, f"page {page}: held {counted} times, recorded {recorded}"
            assert (page in free) == (counted == 0), f"page {page}: free and held disagree"
        assert held[0] == 0, "the empty page is in a table"
