"""Connects the arena of the attention ranks with a disk.

    rank's page  <-- rank -->  slot of the arena  <-- here -->  store on the disk

Pages pass through the arena in both directions, so ranks know nothing of the disk. A page is handed
to the store once its slot is filled, and what the store has read is put into slots, where every
rank finds it. As with the tier of one process, a job of the store shares no memory: pages are
copied on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.arena import ArenaIndex
from moe_serve.cache.tiers.store import LoadedPages, PageStore, SavedPage, TierStats
from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.store_loads import RecentSteps, StoreLoad, StoreLoads, close_store

_PAGES_PER_TURN = 16  # copied for the store in a step of the ranks
_MOST_QUEUED = 65536  # pages that wait to be copied


class ArenaDisk:
    """The store behind an arena, for the tiers of all attention ranks. Used on the engine's
    thread."""

    def __init__(
        self,
        arena: ArenaIndex,
        slots: NDArray[np.uint8],
        store: PageStore,
        page_size: int,
        clock: Clock,
    ) -> None:
        """`slots` is the arena's memory, [slots, bytes of a slot], and `page_size` is in tokens."""
        self._arena, self._slots, self._store, self._clock = arena, slots, store, clock
        self._page_size = page_size
        self._loads = StoreLoads(store, page_size, slots.shape[1], clock)
        self._filled: deque[tuple[bytes, bytes]] = deque()  # key, parent key
        self._num_dropped = 0

    @property
    def has_work(self) -> bool:
        """Returns whether pages can be handed to the store."""
        return bool(self._filled) and self._store.room > 0

    def step_times(self) -> RecentSteps:
        """Returns the object that measures the steps of one rank's engine."""
        return RecentSteps(self._loads.rule, self._clock)

    def filled(self, key: bytes, parent_key: bytes) -> None:
        """Notes a page whose slot is filled."""
        if len(self._filled) < _MOST_QUEUED:
            self._filled.append((key, parent_key))
        else:
            self._num_dropped += 1

    def awaits(self, sequence: Sequence) -> bool:
        """See `KVTier.awaits`."""
        return self._loads.awaits(sequence)

    def begin_load(self, sequence: Sequence, num_found: int, keys: list[bytes]) -> bool:
        """Begins to load the pages of `keys` into slots. `num_found` pages before them are in the
        cache or in slots. Returns whether the sequence should wait.
        """
        return self._loads.begin(sequence, num_found, keys)

    def update(self) -> None:
        """Takes the loaded pages, and hands over filled slots."""
        self._loads.take(self._enter)
        if self._filled:
            self.hand_over()

    def hand_over(self) -> None:
        """Copies filled slots for the store, as long as it has room. Ranks may run a step
        meanwhile.
        """
        for _ in range(min(_PAGES_PER_TURN, len(self._filled), self._store.room)):
            key, parent_key = self._filled.popleft()
            slot = self._arena.slot_of(key)
            if slot is None:
                self._num_dropped += 1  # evicted meanwhile
            elif not self._store.has(key):
                data = self._store.buffer()
                data[:] = self._slots[slot]
                self._store.save(SavedPage(key, parent_key, self._page_size, data))

    def wait(self) -> None:
        """Waits a moment if a sequence waits for pages while no rank has work."""
        self._loads.wait()

    def close(self) -> None:
        """Stores the pages of filled slots, for at most some seconds."""
        close_store(
            self._store, self._clock, has_rest=lambda: bool(self._filled), store_more=self.update
        )

    def stats(self) -> TierStats:
        """Returns the store's figures together with those of the arena. The counts of requested and
        found pages are for both together."""
        stats, memory = self._loads.stats(), self._arena.stats()
        dropped = self._num_dropped + stats.saves.get("dropped", 0)
        return replace(
            stats,
            num_queued=stats.num_queued + len(self._filled),
            saves={**stats.saves, "dropped": dropped},
            queried_tokens=memory.queried_tokens,
            hit_tokens=memory.hit_tokens,
            memory=memory,
        )

    def _enter(self, load: StoreLoad, loaded: LoadedPages) -> int:
        """Puts loaded pages into slots while there are free ones. Returns their number. It must get
        all pages of a load at once, so that none of them takes another's slot."""
        run: list[tuple[bytes, int]] = []
        for key, page in zip(load.keys, loaded, strict=False):
            slot = self._arena.reserve()
            if slot is None:
                break
            self._slots[slot] = page
            run.append((key, slot))
        for key, slot in reversed(run):  # the run's beginning is evicted last
            self._arena.enter(key, slot)
        return len(run)
