"""KV pages that sequences share: the pool, the tree of prefixes over it, and who goes first.

The tree holds one reference to each of its pages. A page of the tree that nobody else holds is
*idle*: it can be had at any time, least recently used first. Whoever uses a page uses its parent
too, and lets go of the child first, so a page becomes idle before its parent does, and the page
that has been idle for longest is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.page_pool import PagePool
from moe_serve.cache.page_times import SampledPages
from moe_serve.cache.prefix_tree import PrefixTree


class PrefixCache:
    """Hands out pages, keeps those whose values are known, evicts when pages run out."""

    def __init__(self, num_pages: int, sampled: SampledPages | None = None) -> None:
        """`sampled`: pages whose times are measured; None: none."""
        self._pool = PagePool(num_pages)
        self.sampled = SampledPages(0.0) if sampled is None else sampled
        self.tree = PrefixTree(num_pages)
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle for longest first
        self.num_evicted = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_available(self) -> int:
        """Pages that no sequence holds: free, or idle."""
        return self._pool.num_free + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self.tree)

    def num_idle(self, pages: Iterable[int]) -> int:
        return sum(page in self._idle for page in pages)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting if too few are free; the caller has checked."""
        assert count <= self.num_available, f"{count} pages wanted, {self.num_available} available"
        for _ in range(count - self._pool.num_free):
            page, _ = self._idle.popitem(last=False)
            self.tree.remove(page)
            self._pool.release([page])
            self.sampled.evicted(page)
            self.num_evicted += 1
        pages = self._pool.allocate(count)
        self.sampled.handed_out(pages)
        return pages

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest known run of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self.tree.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """One more owner for pages that are in use or idle: somebody found them."""
        self.sampled.found(pages)
        self._hold(pages)

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._pool.share(page)
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> list[int]:
        """Give up one reference to each page of a run, last first; returns those that are free now.

        Pages of the tree stay: without another owner they are idle from now on.
        """
        freed = self._pool.release(reversed(pages))
        self.sampled.freed(freed)
        for page in reversed(pages):
            if page in self.tree and self._pool.num_references(page) == 1:
                self._idle[page] = None
        return freed

    def enter(self, page: int, key: bytes, parent_key: bytes, tokens: NDArray[np.int32]) -> int:
        """Make an owned page with finite values visible to others -> the page its owner has now.

        If the same content is cached already, the owner changes to that page and gives up its own.
        """
        cached = self.tree.find(key)
        if cached is None:
            self.tree.insert(page, key, parent_key, tokens)
            self._pool.share(page)
            return page
        if cached != page:
            self._hold([cached])
            self.release([page])
        return cached

    def forget(self, pages: Sequence[int]) -> list[int]:
        """Drop the idle leaves at the end of a run from the tree -> the pages that are free now."""
        freed: list[int] = []
        for page in reversed(pages):
            if page not in self._idle or self.tree.has_children(page):
                break
            del self._idle[page]
            self.tree.remove(page)
            freed += self._pool.release([page])
        self.sampled.freed(freed)
        return freed

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Pool, tree and the owners' tables agree, and eviction would always take a leaf."""
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
        assert not is_late.any(), f"pages {idle[is_late][:5].tolist()} would go after their parents"
