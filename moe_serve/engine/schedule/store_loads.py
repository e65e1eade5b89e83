"""Tracks the loads from a store, the sequences that wait for them, and the time they may take.

A load that takes longer than computing is given up: its sequence takes the pages that were read,
and computes the rest. While a load is past its deadline no other load begins, and after the third
late load in a row the store is switched off. Loaded pages are handed to the caller, which puts them
in place, some of them while the rest is read.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from moe_serve.cache.tiers.store import LoadDone, LoadedPages, PageStore, TierStats
from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.load_or_compute import Decision, LoadOrCompute

_log = logging.getLogger(__name__)

_MOST_LATE = 3  # times in turn that loads took until their deadline: the store is switched off
_MOST_LOADS = (
    2  # most loads of one sequence, so that pages that are evicted at once are not read for ever
)
_WAIT_S = 0.005  # for the store, while nothing else is to be done
_CLOSE_S = 10.0  # for pages that are not stored yet, at the end
_LEAST_ENTERED = 16  # fewer pages of a running load are not handed over
_PROBE_PAGES, _PROBE_EVERY = 4, 32  # a small load after 0, 1, 2, 4 ... 32, 64, 96 that do not pay


@dataclass(slots=True)
class StoreLoad:
    """A load that has not ended: the pages of `keys`, behind the sequence's first pages."""

    sequence: Sequence
    num_found: int  # pages that the sequence had
    keys: list[bytes]
    patience: float  # when its sequence gives it up
    deadline: float  # when it shows that the store hangs
    decision: Decision
    is_probe: bool = False
    num_entered: int = 0  # pages that the caller has put in place
    is_cut: bool = False  # the caller could not put one in place, so later ones are useless


Enter = Callable[[StoreLoad, LoadedPages], int]


class StoreLoads:
    """Begins loads from one store and gives up late ones. Used on the engine's thread only."""

    def __init__(self, store: PageStore, page_size: int, page_bytes: int, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._page_size, self._page_bytes = page_size, page_bytes
        self.rule = LoadOrCompute()
        self._loads: dict[int, StoreLoad] = {}
        self._late: dict[int, StoreLoad] = {}  # given up, but not ended
        self._hanging: set[int] = set()  # those that are past their deadlines
        self._awaited: dict[bytes, int] = {}  # first key of a load -> the load
        self._numbers = itertools.count()
        self._num_late = self._num_skipped = 0
        self._num_queried = self._num_hit = 0
        self._counts: Counter[str] = Counter()

    def awaits(self, sequence: Sequence) -> bool:
        """See `KVTier.awaits`."""
        return sequence.awaited_key in self._awaited

    def begin(self, sequence: Sequence, num_found: int, keys: list[bytes]) -> bool:
        """Begins to load the pages of `keys`, which are behind the `num_found` that a sequence
        could start with. Returns whether it should wait for them."""
        size = self._page_size
        if sequence.started_at is None and not sequence.num_tier_loads:
            self._num_queried += sequence.num_tokens - num_found * size
        if self._hanging or sequence.num_tier_loads >= _MOST_LOADS:
            return False  # the store does not answer, or the loaded pages were evicted at once
        if keys and keys[0] in self._awaited:
            sequence.awaited_key = keys[0]
            return True
        keys = keys[: self._store.num_held(keys)]
        if not keys:
            return False
        running = itertools.chain(self._loads.values(), self._late.values())
        num_queued = sum(len(load.keys) for load in running)
        if self.rule.read_rate is None:
            self.rule.read_rate = self._store.read_rate
        num_bytes, num_queued_bytes = len(keys) * self._page_bytes, num_queued * self._page_bytes
        decision = self.rule.decide(len(keys) * size, num_bytes, num_queued_bytes)
        if not decision.is_load:
            self._skip(sequence, num_found, keys, decision)
            return False
        sequence.num_tier_loads += 1
        sequence.awaited_key = keys[0]
        self._awaited[keys[0]] = self._begin(sequence, num_found, keys, decision)
        return True

    def take(self, enter: Enter, *, is_gradual: bool = False) -> None:
        """Hands over loaded pages and gives up late loads. `enter` puts pages, which follow those
        of earlier calls, where the sequence finds them, and returns their number. `is_gradual`: it
        also gets pages of running loads."""
        if not (self._loads or self._late):
            return  # most steps: no load was begun
        for load, done in itertools.chain(self._take_done(), self._give_up_slow()):
            self._enter(enter, load, done.pages[load.num_entered :])
        if is_gradual:
            for number, load in self._loads.items():
                if self._has_more(number, load):
                    self._enter(enter, load, self._store.read_pages(number, load.num_entered))
        self._count_hanging()

    def _has_more(self, number: int, load: StoreLoad) -> bool:
        """Returns True if a load has read enough further pages to be worth another lookup of the
        pages before them."""
        progress = None if load.is_probe or load.is_cut else self._store.progress(number)
        num_read = 0 if progress is None else progress.num_read
        return num_read - load.num_entered >= max(_LEAST_ENTERED, load.num_entered // 4)

    def _enter(self, enter: Enter, load: StoreLoad, pages: LoadedPages) -> None:
        if not pages or load.is_cut:
            return
        count = enter(load, pages)
        load.num_entered += count
        load.is_cut = count < len(pages)
        load.sequence.num_tier_tokens += count * self._page_size
        self._num_hit += count * self._page_size

    def wait(self) -> None:
        """Waits a moment if a sequence waits for a load."""
        if any(not load.is_probe for load in self._loads.values()):
            self._store.wait(_WAIT_S)

    def stats(self) -> TierStats:
        """Returns the store's figures together with those of the loads that never reached it."""
        stats = self._store.stats()
        return replace(
            stats,
            loads={**stats.loads, **self._counts},
            queried_tokens=self._num_queried,
            hit_tokens=self._num_hit,
            read_bytes_per_s=self.rule.read_rate,
        )

    def _begin(
        self,
        sequence: Sequence,
        num_found: int,
        keys: list[bytes],
        decision: Decision,
        *,
        is_probe: bool = False,
    ) -> int:
        number, now = next(self._numbers), self._clock()
        patience = now + (decision.deadline_s if is_probe else decision.patience_s)
        deadline = now + decision.deadline_s
        self._loads[number] = StoreLoad(
            sequence, num_found, keys, patience, deadline, decision, is_probe
        )
        self._store.load(number, keys)
        return number

    def _skip(
        self, sequence: Sequence, num_found: int, keys: list[bytes], decision: Decision
    ) -> None:
        """Counts a run that is computed, and measures the store now and then."""
        self._counts["skipped_slow"] += len(keys)
        number = self._num_skipped
        is_due = number % _PROBE_EVERY == 0 or (number < _PROBE_EVERY and not number & (number - 1))
        if is_due and not self._loads:
            self._begin(sequence, num_found, keys[:_PROBE_PAGES], decision, is_probe=True)
        self._num_skipped += 1

    def _take_done(self) -> Iterator[tuple[StoreLoad, LoadDone]]:
        """Yields the loads that have ended and that a sequence waits for."""
        for done in self._store.take_done():
            self._hanging.discard(done.job)
            if self._late.pop(done.job, None) is not None:
                continue  # already noted when it was given up: the sequence computes
            load = self._loads.pop(done.job)
            if load.is_probe:
                self.rule.replace_read_rate(done.num_bytes, done.seconds)
                continue
            self.rule.note_load(done.num_bytes, done.seconds)
            del self._awaited[load.keys[0]]
            self._num_late = 0
            yield load, done

    def _give_up_slow(self) -> Iterator[tuple[StoreLoad, LoadDone]]:
        """Ends loads that take too long, and yields those that a sequence waits for with what was
        read: it computes the rest."""
        for number in [key for key, load in self._loads.items() if self._is_too_slow(key, load)]:
            load, progress = self._loads.pop(number), self._store.progress(number)
            self._late[number] = load
            pages = self._store.cancel(number)
            seconds = 0.0 if progress is None else progress.seconds
            if progress is not None:
                num_bytes = max(1, progress.num_read) * self._page_bytes
                self.rule.replace_read_rate(num_bytes, seconds)
            if load.is_probe:
                continue
            self._num_skipped = 0
            del self._awaited[load.keys[0]]
            load.sequence.num_tier_loads = _MOST_LOADS
            self._counts["late"] += len(load.keys) - len(pages)
            yield load, LoadDone(number, pages, len(load.keys), seconds)

    def _is_too_slow(self, number: int, load: StoreLoad) -> bool:
        if self._clock() > load.patience:
            return True
        progress = None if load.is_probe else self._store.progress(number)
        if progress is None:
            return False
        return load.decision.is_too_slow(progress.num_read / len(load.keys), progress.seconds)

    def _count_hanging(self) -> None:
        """Switches off a store that hangs."""
        now = self._clock()
        hanging = {number for number, load in self._late.items() if now > load.deadline}
        is_new, self._hanging = bool(hanging) and not self._hanging, hanging
        if not is_new or all(self._late[number].is_probe for number in hanging):
            return  # several loads that are late together count once
        self._num_late += 1
        if self._num_late == _MOST_LATE:
            why = f"loads were late {_MOST_LATE} times in turn"
            _log.warning("the KV tier is switched off: %s.", why)
            self._store.stop_reading(why)
        else:
            _log.warning("the KV tier is slow: it reads nothing else until a late load has ended.")


class RecentSteps:
    """Measures the steps of an engine for the rule that chooses between loading and computing."""

    def __init__(self, rule: LoadOrCompute, clock: Clock) -> None:
        self._rule, self._clock = rule, clock
        self._step: tuple[float, int, int] | None = None  # its begin, tokens, those of prompts

    def begins(self, steps: Collection[tuple[Sequence, int]]) -> None:
        """Notes a step's sequences and their tokens. A step in which no sequence computes more than
        one says nothing about prompts, and is not looked at again."""
        num_tokens = sum(count for _, count in steps)
        self._step = None
        if num_tokens > len(steps):
            num_prompt_tokens = sum(s.num_unread(count) for s, count in steps)
            self._step = self._clock(), num_tokens, num_prompt_tokens

    def ended(self) -> None:
        """Notes the end of the step that began last. One that began before that end is not
        measured."""
        if self._step is not None:
            begin, num_tokens, num_prompt_tokens = self._step
            self._rule.note_step(num_tokens, num_prompt_tokens, self._clock() - begin)
        self._step = None


def close_store(
    store: PageStore, clock: Clock, *, has_rest: Callable[[], bool], store_more: Callable[[], None]
) -> None:
    """Stores the pages that are not stored yet, at most for some seconds, and closes the store.

    `has_rest`: returns whether such pages are left; `store_more` gives the store those for which it
    has room.
    """
    deadline = clock() + _CLOSE_S
    while has_rest() and clock() < deadline:
        store_more()
        if store.room <= 0:
            if not store.stats().is_writing:
                break
            store.wait(_WAIT_S)
    store.close(max(0.1, deadline - clock()))
