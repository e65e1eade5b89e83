"""Keeps copies of one rank's pages in an arena, and starts sequences with pages from there.

Copies are made by the rank, in the order of its messages: what is saved is copied before the page
is used again, and what is loaded is there before a step reads it. Nothing waits. A copy counts once
a later step of the rank has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.cache.page_key import token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.arena import ArenaIndex
from moe_serve.cache.tiers.store import TierStats
from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.kv_tier import KVTier

_PAGES_PER_STEP = 32  # copied in a step


@dataclass(frozen=True, slots=True)
class RankCopies:
    """Tells a rank to copy before its next step: pages into slots, or slots into pages."""

    save: Callable[[int, int], None]  # page, slot
    load: Callable[[int, int], None]  # slot, page


class ArenaTier(KVTier):
    """Connects one rank's prefix cache with the arena."""

    def __init__(
        self,
        cache: PrefixCache,
        arena: ArenaIndex,
        copies: RankCopies,
        clock: Clock,
        give_after_s: float,
    ) -> None:
        """`give_after_s`: how often running sequences give their full pages."""
        self._cache, self._arena, self._copies, self._clock = cache, arena, copies, clock
        self._give_after_s, self._next_give = give_after_s, clock() + give_after_s
        self._fresh: deque[tuple[int, bytes]] = deque()  # page, key
        self._saving: list[tuple[bytes, int]] = []  # key, slot: the rank may not have copied yet
        self._loading: list[int] = []  # slots, likewise

    @property
    def is_due(self) -> bool:
        """See `KVTier.is_due`."""
        return self._clock() >= self._next_give

    def entered(self, page: int, key: bytes, parent_key: bytes) -> None:
        """See `KVTier.entered`."""
        self._fresh.append((page, key))

    def begin_load(self, sequence: Sequence, found: list[int]) -> bool:
        """See `KVTier.begin_load`. Nothing waits: pages of the arena join `found`."""
        cache, arena, size = self._cache, self._arena, self._cache.page_size
        num_found, num_wanted = len(found), (sequence.num_tokens - 1) // size
        arena.counts.num_queried_tokens += sequence.num_tokens - num_found * size
        slots = arena.find(sequence.page_keys[num_found + 1 : num_wanted + 1])
        if not slots:
            return False
        cache.pin(found)
        for index, slot in enumerate(slots, num_found):
            if not cache.num_available:
                break
            (page,) = cache.allocate(1)
            self._copies.load(slot, page)
            arena.pin(slot)
            self._loading.append(slot)
            parent_key, key = sequence.page_keys[index : index + 2]
            tokens = token_array(sequence.token_ids[index * size : (index + 1) * size])
            found.append(cache.enter(page, key, parent_key, tokens))
        cache.release(found)
        arena.counts.num_loaded += len(found) - num_found
        arena.counts.num_hit_tokens += (len(found) - num_found) * size
        return False

    def update(self) -> None:
        """See `KVTier.update`. Has fresh pages copied."""
        if self.is_due:
            self._next_give = self._clock() + self._give_after_s
        for _ in range(min(_PAGES_PER_STEP, len(self._fresh))):
            page, key = self._fresh.popleft()
            if self._cache.tree.find(key) != page or key in self._arena:
                continue
            slot = self._arena.reserve()
            if slot is not None:
                self._copies.save(page, slot)
                self._saving.append((key, slot))

    def step_ended(self) -> None:
        """Note that the rank has done all copies that it was told before."""
        for key, slot in self._saving:
            self._arena.enter(key, slot)
        for slot in self._loading:
            self._arena.unpin(slot)
        self._saving, self._loading = [], []

    def abandon(self) -> None:
        """Note that the rank is lost: its last copies may be incomplete."""
        for _, slot in self._saving:
            self._arena.give_back(slot)
        for slot in self._loading:
            self._arena.unpin(slot)
        self._saving, self._loading = [], []
        self._fresh.clear()

    def stats(self) -> TierStats:
        """See `KVTier.stats`. The figures are those of all ranks."""
        return self._arena.stats()
