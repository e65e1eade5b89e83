"""KV pages that sequences share: the pool, the tree of prefixes over it, and the order of eviction.

The tree holds one reference to each of its pages. A page of the tree without another owner is
*idle*: it can be evicted at any time, least recently used first. A sequence that uses a page uses
its parent too, and releases the child first. So a page becomes idle before its parent does, and the
page that has been idle for longest is always a leaf.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.events.change_record import (
    BASE_MODEL,
    IGNORE_PAGES,
    PageListener,
    PageOrigin,
    PublishedPage,
)
from moe_serve.cache.page_times import SampledPages
from moe_serve.cache.prefix_tree import PrefixTree


class PagePool:
    """Pages 1 .. num_pages, each free or held by one or more owners (reference count).

    It knows page numbers only, not their contents. Page 0 is the empty page: never handed out.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, f"num_pages must be 1 or more, got {num_pages}"
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._references = array("q", bytes(8 * (num_pages + 1)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Adds an owner to a page that already has one."""
        assert self._references[page] > 0, f"page {page} is free and cannot be shared"
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drops one reference to each page and returns those that became free."""
        freed = []
        for page in pages:
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was released more often than held"
            if self._references[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed

    def references(self) -> NDArray[np.int64]:
        """Returns the reference count of every page, from page 0 on; a copy."""
        return np.array(self._references, dtype=np.int64)

    def check_integrity(self, tables: Iterable[Sequence[int] | NDArray[np.int64]]) -> None:
        """Checks that every page is free once, or held exactly as often as the owners' tables name
        it.
        """
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


class PrefixCache:
    """Hands out pages, keeps those whose values are known, and evicts when pages run out."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        sampled: SampledPages | None = None,
        listener: PageListener = IGNORE_PAGES,
    ) -> None:
        """`sampled`: the pages whose times are measured; None disables measuring. `listener` hears
        of full pages that enter and leave the tree."""
        self._pool, self.page_size, self.listener = PagePool(num_pages), page_size, listener
        self.sampled = SampledPages(0.0) if sampled is None else sampled
        self.tree = PrefixTree(num_pages, page_size)
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self.num_evicted = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_available(self) -> int:
        """The number of pages that no sequence holds: free or idle."""
        return self._pool.num_free + len(self._idle)

    @property
    def num_free(self) -> int:
        """Number of pages that nothing uses, not even the cache."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return len(self.tree)

    def num_idle(self, pages: Iterable[int]) -> int:
        return sum(page in self._idle for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, evicting if too few are free;
        the caller has checked `num_available`.
        """
        assert count <= self.num_available, (
            f"{count} pages requested, {self.num_available} available"
        )
        self._evict(count - self._pool.num_free)
        pages = self._pool.allocate(count)
        self.sampled.handed_out(pages)
        return pages

    def _evict(self, count: int) -> None:
        for _ in range(count):
            page, _ = self._idle.popitem(last=False)
            self._remove(page)
            self._pool.release([page])
            self.sampled.evicted(page)
            self.num_evicted += 1

    def withdraw(self, pages: Sequence[int]) -> bool:
        """Takes a run from the root out of the tree, so that only its owner has it. Idle pages are
        evicted first. Returns False if others use a page of the run, or pages behind it; then it
        stays.
        """
        self._evict(len(self._idle))
        for place, page in enumerate(pages):
            num_children = int(place + 1 < len(pages))  # the next page of the run
            is_own = self._pool.num_references(page) == 2  # the owner's and the tree's
            if not is_own or self.tree.num_children(page) != num_children:
                return False
        for page in reversed(pages):
            self._remove(page)
        self._pool.release(pages)
        return True

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the cached pages of the longest known run of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self.tree.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Adds an owner to pages, in use or idle, that a sequence found."""
        self.sampled.found(pages)
        self.pin(pages)

    def pin(self, pages: Iterable[int]) -> None:
        """Adds an owner to the pages of a run from the root, so that they are not evicted."""
        for page in pages:
            self._pool.share(page)
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drops one reference to each page of a run, last first, and returns those that are now
        free.

        Pages of the tree stay: without another owner they become idle.
        """
        freed = self._pool.release(reversed(pages))
        self.sampled.freed(freed)
        for page in reversed(pages):
            if page in self.tree and self._pool.num_references(page) == 1:
                self._idle[page] = None
        return freed

    def enter(
        self,
        page: int,
        key: bytes,
        parent_key: bytes,
        tokens: NDArray[np.int32],
        origin: PageOrigin = BASE_MODEL,
    ) -> int:
        """Makes an owned page with finite values visible to others. Returns the page that its owner
        then has.

        If the same content is cached already, the owner switches to that page and releases its own.
        """
        cached = self.tree.find(key)
        if cached is None:
            self.tree.insert(page, key, parent_key, tokens)
            self._pool.share(page)
            if len(tokens) == self.page_size:
                parent = None if self.tree.find(parent_key) is None else parent_key
                self.listener.stored(PublishedPage(key, parent, tokens, origin))
            return page
        if cached != page:
            self.pin([cached])
            self.release([page])
        return cached

    def _remove(self, page: int) -> None:
        """Takes a page without children out of the tree."""
        if self.tree.is_full(page):
            self.listener.removed(self.tree.key_of(page))
        self.tree.remove(page)

    def forget(self, pages: Sequence[int]) -> list[int]:
        """Removes the idle leaves at the end of a run from the tree. Returns the pages that are now
        free.
        """
        freed: list[int] = []
        for page in reversed(pages):
            if page not in self._idle or self.tree.has_children(page):
                break
            del self._idle[page]
            self._remove(page)
            freed += self._pool.release([page])
        self.sampled.freed(freed)
        return freed

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Checks that pool, tree and owners' tables agree, and that eviction always takes a
        leaf."""
        cached = np.fromiter(self.tree, np.int64, len(self.tree))
        self._pool.check_integrity([*tables, cached])
        self.tree.check_integrity()
        self.sampled.check_integrity(self._pool.num_references)
        idle = np.fromiter(self._idle, np.int64, len(self._idle))
        rank = np.full(self.num_pages + 1, self.num_pages + 1)
        rank[idle] = np.arange(len(idle))
        is_alone = self._pool.references()[cached] == 1
        wrong = cached[is_alone != (rank[cached] <= self.num_pages)].tolist()
        assert not wrong, f"pages {wrong[:5]} are idle and used, or neither"
        assert len(idle) == is_alone.sum(), f"{len(idle) - is_alone.sum()} idle pages have no key"
        is_late = rank[idle] > rank[self.tree.parents_of(idle)]
        assert not is_late.any(), (
            f"pages {idle[is_late][:5].tolist()} would be evicted after their parents"
        )
