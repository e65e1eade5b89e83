"""Keeps copies of one rank's pages in an arena, and starts sequences with pages from there.

Copies are made by the rank, in the order of its messages: a saved page is copied before it is used
again, and a loaded one is there before a step reads it. Nothing waits for a copy: it counts once a
later step of the rank has ended. A rank without a step is told to copy at once, so that no computed
page exists only on that rank. With a disk behind the arena, a sequence may wait until pages are
read into slots.
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
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.arena_disk import ArenaDisk
from moe_serve.engine.schedule.kv_tier import KVTier

_PAGES_PER_STEP = 32  # copied in a step; more if the step before filled more


@dataclass(frozen=True, slots=True)
class RankCopies:
    """Tells a rank to copy before its next step: pages into slots, or slots into pages."""

    save: Callable[[int, int], None]  # page, slot
    load: Callable[[int, int], None]  # slot, page
    finish: Callable[[int], None]  # returns after all copies were made, up to that of a page


@dataclass(frozen=True, slots=True)
class _Saving:
    """A page that a rank copies into a slot."""

    page: int
    slot: int
    key: bytes
    parent_key: bytes


class ArenaTier(KVTier):
    """Connects one rank's prefix cache with the arena."""

    def __init__(
        self,
        cache: PrefixCache,
        arena: ArenaIndex,
        copies: RankCopies,
        clock: Clock,
        give_after_s: float,
        disk: ArenaDisk | None = None,
    ) -> None:
        """`give_after_s` is the time after which running sequences give their full pages. `disk` is
        the store behind the arena, for all ranks.
        """
        self._disk, self._times = disk, None if disk is None else disk.step_times()
        self._cache, self._arena, self._copies, self._clock = cache, arena, copies, clock
        self._give_after_s, self._next_give = give_after_s, clock() + give_after_s
        self._fresh: deque[tuple[int, bytes, bytes]] = deque()  # page, key, parent key
        self._saving: list[_Saving] = []  # the rank may not have copied yet
        self._loading: list[int] = []  # slots, likewise
        self._most_copied = _PAGES_PER_STEP  # in the next step
        self._is_sound = True  # as far as known, the step that was scheduled last

    @property
    def has_work(self) -> bool:
        """See `KVTier.has_work`: all pages are copied, also those of a rank without a step."""
        is_storing = self._disk is not None and self._disk.has_work
        return bool(self._saving or self._fresh) or is_storing

    @property
    def is_due(self) -> bool:
        """See `KVTier.is_due`."""
        return self._clock() >= self._next_give

    @property
    def is_behind(self) -> bool:
        """See `KVTier.is_behind`. The disk needs no schedule: it is served after each step."""
        return bool(self._fresh)

    def entered(self, page: int, key: bytes, parent_key: bytes) -> None:
        """See `KVTier.entered`."""
        self._fresh.append((page, key, parent_key))

    def awaits(self, sequence: Sequence) -> bool:
        """See `KVTier.awaits`."""
        return self._disk is not None and self._disk.awaits(sequence)

    def begin_load(self, sequence: Sequence, found: list[int]) -> bool:
        """See `KVTier.begin_load`. Pages of the arena join `found` at once. Those behind them may
        be on the disk, for which the sequence waits."""
        cache, arena, size = self._cache, self._arena, self._cache.page_size
        num_found, num_wanted = len(found), (sequence.num_tokens - 1) // size
        keys = sequence.page_keys[num_found + 1 : num_wanted + 1]
        slots = arena.find(keys)
        if self._disk is not None:
            num_here, behind = num_found + len(slots), keys[len(slots) : arena.num_slots]
            if self._disk.begin_load(sequence, num_here, behind):
                return True
        arena.counts.num_queried_tokens += sequence.num_tokens - num_found * size
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
            origin = sequence.request.page_origin
            found.append(cache.enter(page, key, parent_key, tokens, origin))
        cache.release(found)
        arena.counts.num_loaded += len(found) - num_found
        arena.counts.num_hit_tokens += (len(found) - num_found) * size
        return False

    def update(self) -> None:
        """See `KVTier.update`. Orders copies of fresh pages."""
        if self.is_due:
            self._next_give = self._clock() + self._give_after_s
        for _ in range(min(self._most_copied, len(self._fresh))):
            page, key, parent_key = self._fresh.popleft()
            if self._cache.tree.find(key) != page or key in self._arena:
                continue
            slot = self._arena.reserve()
            if slot is not None:
                self._copies.save(page, slot)
                self._saving.append(_Saving(page, slot, key, parent_key))
        if self._disk is not None:
            self._disk.update()

    def step_begins(self, schedule: Schedule) -> None:
        """See `KVTier.step_begins`. A rank without a step makes its copies now."""
        self._is_sound = True
        num_tokens = sum(count for _, count in schedule.values())
        self._most_copied = max(_PAGES_PER_STEP, num_tokens // self._cache.page_size)
        if self._times is not None:
            self._times.begins(schedule.values())
        if not schedule:
            self._finish_copies()

    def step_failed(self) -> None:
        """See `KVTier.step_failed`. A shard of the rank may be behind with its copies."""
        self._is_sound = False

    def step_ended(self) -> None:
        """Notes that the rank has made all copies that were ordered before."""
        if self._times is not None:
            self._times.ended()
        if self._is_sound:
            self._settle()
        if self._disk is not None and self._disk.has_work:
            self._disk.hand_over()

    def _settle(self) -> None:
        for saving in self._saving:
            self._arena.enter(saving.key, saving.slot)
            if self._disk is not None:
                self._disk.filled(saving.key, saving.parent_key)
        for slot in self._loading:
            self._arena.unpin(slot)
        self._saving, self._loading = [], []

    def abandon(self) -> None:
        """Notes that the rank is lost: its last copies may be incomplete."""
        for saving in self._saving:
            self._arena.give_back(saving.slot)
        for slot in self._loading:
            self._arena.unpin(slot)
        self._saving, self._loading = [], []
        self._fresh.clear()

    def stats(self) -> TierStats:
        """See `KVTier.stats`. The figures are those of all ranks."""
        return self._arena.stats() if self._disk is None else self._disk.stats()

    def close(self) -> None:
        """See `KVTier.close`. Fills slots with pages that have no copy yet. The disk's owner closes
        the disk, because other ranks use it too. Raises ExecutorLostError."""
        while self._disk is not None and (self._fresh or self._saving):
            self.update()
            self._finish_copies()

    def _finish_copies(self) -> None:
        """Makes the rank finish the copies that were ordered, and waits for them. Raises
        ExecutorLostError.
        """
        if self._saving:
            self._copies.finish(self._saving[-1].page)
            self._settle()
