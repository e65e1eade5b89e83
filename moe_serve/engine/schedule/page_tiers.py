"""Moves pages between the prefix cache and a tier, without ever waiting for it.

Full pages are copied for the store at the beginning of steps, a few at a time: many become full at
once, and a step that copied all of them would be late. If the next pages of a waiting sequence are
in the store, the sequence waits while they are read, as it would for a running sequence that
computes them; others start in the meantime. Pages enter the cache while the rest is read. A late
load is given up, and the sequence computes the pages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.page_key import token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.store import LoadedPages, PageStore, SavedPage, TierStats
from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.kv_tier import KVTier
from moe_serve.engine.schedule.store_loads import RecentSteps, StoreLoad, StoreLoads, close_store

_PAGES_PER_STEP = 16  # most pages copied for the store in a step
_SPREAD_STEPS = 64  # steps over which a burst of full pages is copied
_TOGETHER = 4  # least pages copied in a step, as the first one takes longest
_BEHIND_SHARE = 8  # one in so many pages of the cache may wait to be copied; more could be evicted
_MOST_QUEUED = 65536  # pages that wait to be copied


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Reads and writes the bytes of pages, on the engine's thread."""

    read: Callable[[int, NDArray[np.uint8]], None]
    write: Callable[[int, NDArray[np.uint8]], None]
    num_bytes: int  # of a page


class PageTiers(KVTier):
    """Connects a prefix cache with one store. Used on the engine's thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        store: PageStore,
        pages: PageAccess,
        clock: Clock,
        give_after_s: float = 2.0,
    ) -> None:
        """`give_after_s` is the time after which running sequences give their full pages."""
        self._give_after_s, self._next_give = give_after_s, clock() + give_after_s
        self._cache, self._store, self._pages, self._clock = cache, store, pages, clock
        self.loads = StoreLoads(store, cache.page_size, pages.num_bytes, clock)
        self._times = RecentSteps(self.loads.rule, clock)
        self._fresh: deque[tuple[int, bytes, bytes]] = deque()  # page, key, parent key
        self._pace, self._due = 0.0, 0.0  # pages per step until none is left; pages due now
        self._num_dropped = 0

    @property
    def has_work(self) -> bool:
        """See `KVTier.has_work`: pages can be handed to the store."""
        return bool(self._fresh) and self._store.room > 0

    @property
    def is_due(self) -> bool:
        """See `KVTier.is_due`."""
        return self._clock() >= self._next_give

    def entered(self, page: int, key: bytes, parent_key: bytes) -> None:
        """See `KVTier.entered`."""
        if len(self._fresh) < _MOST_QUEUED:
            self._fresh.append((page, key, parent_key))
        else:
            self._num_dropped += 1

    def awaits(self, sequence: Sequence) -> bool:
        """See `KVTier.awaits`."""
        return self.loads.awaits(sequence)

    def begin_load(self, sequence: Sequence, found: list[int]) -> bool:
        """See `KVTier.begin_load`."""
        num_wanted = (sequence.num_tokens - 1) // self._cache.page_size
        keys = sequence.page_keys[len(found) + 1 : num_wanted + 1]
        return self.loads.begin(sequence, len(found), keys)

    def update(self) -> None:
        """See `KVTier.update`."""
        if self.is_due:
            self._next_give = self._clock() + self._give_after_s
        self.loads.take(self._enter, is_gradual=True)
        if self._fresh:
            self._hand_over(self._num_due())

    def _num_due(self) -> int:
        """Returns the number of pages to copy in this step."""
        num_fresh = len(self._fresh)
        self._pace = max(self._pace, num_fresh / _SPREAD_STEPS)
        num_behind = num_fresh - self._cache.num_pages // _BEHIND_SHARE
        self._due = max(self._due + self._pace, num_behind)
        return int(self._due) if self._due >= min(_TOGETHER, num_fresh) else 0

    def _hand_over(self, most: int) -> None:
        """Copies some pages for the store, as long as it has room."""
        for _ in range(min(most, _PAGES_PER_STEP, len(self._fresh), self._store.room)):
            page, key, parent_key = self._fresh.popleft()
            if self._cache.tree.find(key) == page and not self._store.has(key):
                data, size = self._store.buffer(), self._cache.page_size
                self._pages.read(page, data)
                self._store.save(SavedPage(key, parent_key, size, data))
            self._due = max(0.0, self._due - 1)
        if not self._fresh:
            self._pace = self._due = 0.0

    def step_begins(self, schedule: Schedule) -> None:
        """See `KVTier.step_begins`. An empty step delays nothing, so it copies more pages, and
        waits a moment for a running load."""
        self._times.begins(schedule.values())
        if not schedule:
            if self._fresh:
                self._hand_over(_PAGES_PER_STEP)
                self._store.flush()
            self.loads.wait()

    def step_ended(self) -> None:
        """See `KVTier.step_ended`. Measures the step."""
        self._times.ended()

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KVTier.set_waker`."""
        self._store.set_waker(wake)

    def close(self) -> None:
        """See `KVTier.close`."""
        close_store(
            self._store,
            self._clock,
            has_rest=lambda: bool(self._fresh),
            store_more=lambda: self._hand_over(_PAGES_PER_STEP),
        )

    def stats(self) -> TierStats:
        """See `KVTier.stats`."""
        stats = self.loads.stats()
        dropped = self._num_dropped + stats.saves.get("dropped", 0)
        return replace(
            stats,
            num_queued=stats.num_queued + len(self._fresh),
            saves={**stats.saves, "dropped": dropped},
        )

    def _enter(self, load: StoreLoad, loaded: LoadedPages) -> int:
        """Puts loaded pages into the cache while it has room. Returns their number."""
        cache, size, sequence = self._cache, self._cache.page_size, load.sequence
        start = load.num_found + load.num_entered
        found = cache.find(sequence.page_keys[1 : start + 1])
        if len(found) < start or not sequence.page_keys:
            return 0  # evicted in the meantime, or the sequence has left the engine
        cache.pin(found)
        pages = cache.allocate(min(len(loaded), cache.num_available))
        end = start + len(pages)
        tokens = token_array(sequence.token_ids[start * size : end * size]).reshape(-1, size)
        keys, origin = sequence.page_keys[start : end + 1], sequence.request.page_origin
        run: list[int] = []
        for page, data, row, (parent_key, key) in zip(
            pages, loaded, tokens, itertools.pairwise(keys), strict=False
        ):
            self._pages.write(page, data)
            run.append(cache.enter(page, key, parent_key, row, origin))
        cache.release([*found, *run])
        return len(run)
