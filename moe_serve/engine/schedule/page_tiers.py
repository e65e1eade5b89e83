"""Moves pages between the prefix cache and a tier, without ever waiting for it.

Full pages are copied for the store a few at a time, at the beginning of steps. A waiting sequence
whose next pages are in the store waits while these are read, as it would for a running sequence
that computes them; others start in the meantime. A load that is late is given up: the sequence
computes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.page_key import token_array
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.store import LoadDone, PageStore, SavedPage, TierStats
from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.kv_tier import KVTier
from moe_serve.engine.schedule.load_or_compute import LoadOrCompute

_log = logging.getLogger(__name__)

_PAGES_PER_STEP = 16  # copied for the store in a step; a step computes more only of long prompts
_MOST_QUEUED = 65536  # pages that wait to be copied
_MOST_LATE = 3  # loads in turn, before the store is switched off
_MOST_LOADS = 2  # of one sequence: pages that are evicted at once are not read for ever
_CLOSE_S = 10.0  # for pages that are not stored yet
_WAIT_S = 0.005  # for a load, while nothing else is to be done
_PROBE_PAGES, _PROBE_EVERY = 4, 32  # a small load after so many that would not pay


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Reads and writes the bytes of pages, on the engine's thread."""

    read: Callable[[int], NDArray[np.uint8]]
    write: Callable[[int, NDArray[np.uint8]], None]
    num_bytes: int  # of a page


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that has not ended: the pages of `keys`, behind the sequence's first pages."""

    sequence: Sequence
    num_found: int  # pages that the cache had
    keys: list[bytes]
    deadline: float
    is_probe: bool = False


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
        """`give_after_s`: how often running sequences give their full pages."""
        self._give_after_s, self._next_give = give_after_s, clock() + give_after_s
        self._cache, self._store, self._pages, self._clock = cache, store, pages, clock
        self.rule = LoadOrCompute()
        self._fresh: deque[tuple[int, bytes, bytes]] = deque()  # page, key, parent key
        self._loads: dict[int, _Load] = {}
        self._late: dict[int, _Load] = {}  # given up, but not ended
        self._awaited: dict[bytes, int] = {}  # first key of a load -> the load
        self._numbers = itertools.count()
        self._num_late = self._num_skipped = 0
        self._num_queried = self._num_hit = 0
        self._counts: Counter[str] = Counter()
        self._step = 0.0, 0, 0  # its begin, its tokens, and those of prompts

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
            self._counts["dropped"] += 1

    def awaits(self, sequence: Sequence) -> bool:
        """See `KVTier.awaits`."""
        return sequence.awaited_key in self._awaited

    def begin_load(self, sequence: Sequence, found: list[int]) -> bool:
        """See `KVTier.begin_load`."""
        size, num_found = self._cache.page_size, len(found)
        num_wanted = (sequence.num_tokens - 1) // size
        if sequence.started_at is None and not sequence.num_tier_loads:
            self._num_queried += sequence.num_tokens - num_found * size
        if self._late or sequence.num_tier_loads >= _MOST_LOADS:
            return False  # the store is slow, or what it loaded was evicted at once
        keys = sequence.page_keys[num_found + 1 : num_wanted + 1]
        if keys and keys[0] in self._awaited:
            sequence.awaited_key = keys[0]
            return True
        keys = keys[: self._store.num_held(keys)]
        if not keys:
            return False
        num_bytes = self._pages.num_bytes
        num_queued = sum(len(load.keys) for load in self._loads.values())
        if self.rule.read_rate is None:
            self.rule.read_rate = self._store.read_rate
        decision = self.rule.decide(len(keys) * size, len(keys) * num_bytes, num_queued * num_bytes)
        if not decision.is_load:
            self._skip(sequence, num_found, keys, decision.deadline_s)
            return False
        sequence.num_tier_loads += 1
        sequence.awaited_key = keys[0]
        self._awaited[keys[0]] = self._begin(sequence, num_found, keys, decision.deadline_s)
        return True

    def _begin(
        self,
        sequence: Sequence,
        num_found: int,
        keys: list[bytes],
        deadline_s: float,
        *,
        is_probe: bool = False,
    ) -> int:
        number, deadline = next(self._numbers), self._clock() + deadline_s
        self._loads[number] = _Load(sequence, num_found, keys, deadline, is_probe)
        self._store.load(number, keys)
        return number

    def _skip(
        self, sequence: Sequence, num_found: int, keys: list[bytes], deadline_s: float
    ) -> None:
        """Count a run that is computed, and measure the store now and then."""
        self._counts["skipped_slow"] += len(keys)
        if self._num_skipped % _PROBE_EVERY == 0 and not self._loads:
            self._begin(sequence, num_found, keys[:_PROBE_PAGES], deadline_s, is_probe=True)
        self._num_skipped += 1

    def update(self) -> None:
        """See `KVTier.update`."""
        if self.is_due:
            self._next_give = self._clock() + self._give_after_s
        for done in self._store.take_done():
            self._end(done)
        self._give_up_late()
        for _ in range(min(_PAGES_PER_STEP, len(self._fresh), self._store.room)):
            page, key, parent_key = self._fresh.popleft()
            if self._cache.tree.find(key) == page and not self._store.has(key):
                data, size = self._pages.read(page), self._cache.page_size
                self._store.save(SavedPage(key, parent_key, size, data))

    def step_begins(self, schedule: Schedule) -> None:
        """See `KVTier.step_begins`. An empty step waits a moment for a load that runs."""
        num_tokens = sum(count for _, count in schedule.values())
        num_prompt_tokens = sum(s.num_unread(count) for s, count in schedule.values())
        self._step = self._clock(), num_tokens, num_prompt_tokens
        if not schedule and any(not load.is_probe for load in self._loads.values()):
            self._store.wait(_WAIT_S)

    def step_ended(self) -> None:
        """See `KVTier.step_ended`. Measures the step."""
        begin, num_tokens, num_prompt_tokens = self._step
        self.rule.note_step(num_tokens, num_prompt_tokens, self._clock() - begin)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KVTier.set_waker`."""
        self._store.set_waker(wake)

    def close(self) -> None:
        """See `KVTier.close`."""
        deadline = self._clock() + _CLOSE_S
        while self._fresh and self._clock() < deadline:
            self.update()
            if self._store.room <= 0:
                if not self._store.stats().is_writing:
                    break
                self._store.wait(_WAIT_S)
        self._store.close(max(0.1, deadline - self._clock()))

    def stats(self) -> TierStats:
        """Return the store's figures with those of the loads that did not come to it."""
        stats, counts = self._store.stats(), dict(self._counts)
        dropped = counts.pop("dropped", 0) + stats.saves.get("dropped", 0)
        return replace(
            stats,
            num_queued=stats.num_queued + len(self._fresh),
            loads={**stats.loads, **counts},
            saves={**stats.saves, "dropped": dropped},
            queried_tokens=self._num_queried,
            hit_tokens=self._num_hit,
            read_bytes_per_s=self.rule.read_rate,
        )

    def _end(self, done: LoadDone) -> None:
        self.rule.note_load(done.num_bytes, done.seconds)
        if self._late.pop(done.job, None) is not None:
            return  # the sequence computes already
        load = self._loads.pop(done.job)
        if load.is_probe:
            return
        del self._awaited[load.keys[0]]
        self._num_late = 0
        count = self._enter(load, done.pages) * self._cache.page_size
        load.sequence.num_tier_tokens += count
        self._num_hit += count

    def _enter(self, load: _Load, pages: Items[NDArray[np.uint8]]) -> int:
        """Put loaded pages into the cache, as far as it has room. Returns how many."""
        cache, size, sequence = self._cache, self._cache.page_size, load.sequence
        found = cache.find(sequence.page_keys[1 : load.num_found + 1])
        if len(found) < load.num_found or not sequence.page_keys:
            return 0  # evicted in the meantime, or the sequence has left the engine
        cache.pin(found)
        run: list[int] = []
        for data, index in zip(pages, itertools.count(load.num_found), strict=False):
            if not cache.num_available:
                break
            (page,) = cache.allocate(1)
            self._pages.write(page, data)
            tokens = token_array(sequence.token_ids[index * size : (index + 1) * size])
            parent_key, key = sequence.page_keys[index : index + 2]
            run.append(cache.enter(page, key, parent_key, tokens))
        cache.release([*found, *run])
        return len(run)

    def _give_up_late(self) -> None:
        """Let sequences compute whose loads take too long. Switch off a store that hangs."""
        now = self._clock()
        for number in [key for key, load in self._loads.items() if now > load.deadline]:
            load = self._late[number] = self._loads.pop(number)
            if load.is_probe:
                continue
            del self._awaited[load.keys[0]]
            load.sequence.num_tier_loads = _MOST_LOADS
            self._counts["late"] += len(load.keys)
            self._num_late += 1
            if self._num_late == _MOST_LATE:
                why = f"{_MOST_LATE} loads in turn were late"
                _log.warning("the KV tier is switched off: %s.", why)
                self._store.stop_reading(why)
