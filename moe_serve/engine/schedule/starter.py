"""Starts waiting sequences: those that the order and the batch policy put first, while there is
budget, a seat, and pages for the whole prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.clock import Clock
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.prefix_sharing import PrefixSharing
from moe_serve.engine.schedule.reservations import Reservations, num_promised
from moe_serve.engine.schedule.waiting_queue import Skipped, WaitingQueue


@dataclass(slots=True)
class _Examined:
    """The waiting sequences of one group that could have started, by outcome."""

    started: list[Sequence] = field(default_factory=list)
    awaiting: list[Sequence] = field(default_factory=list)
    lacking: list[Sequence] = field(default_factory=list)


class Starter:
    """Moves sequences from `waiting` to `running`, which belong to a scheduler.

    With `is_strict`, less urgent sequences start only when no more urgent one waits. Otherwise a
    sequence that waits for a page that is being computed holds back no other.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: list[Sequence],
        layered: LayeredPrefill,
        sharing: PrefixSharing,
        policy: BatchPolicy,
        clock: Clock,
        *,
        cache: PrefixCache,
        reservations: Reservations,
        is_strict: bool,
    ) -> None:
        self._waiting, self._running, self._reservations = waiting, running, reservations
        self._layered = layered
        self._sharing, self._policy, self._clock = sharing, policy, clock
        self._cache, self._tier, self._is_strict = cache, sharing.tier, is_strict
        self.skipped = Skipped()
        self.num_missed_tokens = 0  # prompt tokens of started sequences, not found in the cache

    @property
    def has_seat(self) -> bool:
        return self._reservations.has_seat

    def admit(self, budget: int, chosen: Schedule, until: float = math.inf) -> int:
        """Starts waiting sequences and returns the rest of the budget. For `until` see
        `Urgency.groups`.
        """
        if not (self._waiting and budget and self.has_seat):
            return budget
        self._sharing.give(self._running)  # make the last steps' pages visible
        for group in self._groups(until):
            num_waiting = len(group)
            examined = self._start(group, budget, chosen)
            costs = self._layered.costs(chosen)
            budget -= sum(costs[sequence.id][1] for sequence in examined.started)
            is_held = bool(examined.lacking)
            if self._is_strict:
                is_held = len(examined.started) < num_waiting
            if is_held or not (budget and self.has_seat):
                break
        return budget

    def _groups(self, until: float) -> Iterator[Items[Sequence]]:
        return self._waiting.groups(until)

    def _start(self, group: Items[Sequence], budget: int, chosen: Schedule) -> _Examined:
        """Starts the sequences of an equally urgent group that can start, in the policy's order."""
        found, policy = _Examined(), self._policy
        try:
            for sequence in policy.candidates(group, self._running):
                pages = self._sharing.find(sequence)
                if pages is None:
                    found.awaiting.append(sequence)
                    continue
                if self._num_spare_pages(sequence, pages) < 0:
                    found.lacking.append(sequence)
                    if policy.is_next(sequence):
                        break
                    continue
                if self._loads_pages(sequence, pages):
                    found.awaiting.append(sequence)
                    continue
                self._run(sequence, pages)
                found.started.append(sequence)
                share = self._layered.share(sequence, budget, chosen)
                missing = sequence.num_missing_pages(sequence.num_computed_tokens + share.count)
                sequence.page_table += self._cache.allocate(max(0, missing))
                chosen[sequence.id] = (sequence, share.count)
                budget -= self._layered.take(sequence, share)
                if not (budget and self.has_seat):
                    break
        finally:
            self.skipped.note(
                self._waiting if self._is_strict else group,
                started=found.started,
                lacking=found.lacking,
                awaiting=found.awaiting,
            )
            for sequence in found.started:
                self._waiting.remove(sequence)
        return found

    def _run(self, sequence: Sequence, pages: list[int]) -> None:
        """Lets a sequence run with the pages that were found for it."""
        # A copy needs a spare page, as its source is held until the copy is made.
        can_copy = self._num_spare_pages(sequence, pages) > 0
        self._sharing.take(sequence, pages, self._running, can_copy=can_copy)
        if sequence.started_at is None:
            sequence.started_at = self._clock()
            self.num_missed_tokens += sequence.num_pending_tokens
        self.join(sequence)

    def join(self, sequence: Sequence) -> None:
        """Lets a sequence that has its pages run."""
        self._running.append(sequence)
        sequence.is_running = True
        self._policy.started(sequence)

    def _loads_pages(self, sequence: Sequence, found: list[int]) -> bool:
        """Begins to load more pages for a sequence that could start; False if it need not wait."""
        is_wanted = sequence.can_share and not sequence.wants_prompt_logprobs
        return is_wanted and self._tier.begin_load(sequence, found)

    def _num_spare_pages(self, sequence: Sequence, found: list[int]) -> int:
        """Returns the pages left after a sequence takes those for its prompt and one token, and the
        running prompts take those they still need."""
        missing = sequence.num_missing_pages(sequence.num_tokens + 1) - len(found)
        spare = self._cache.num_available - num_promised(self._running)
        return spare - missing - self._cache.num_idle(found)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drops sequences that have ended."""
        self.skipped.forget(sequences)
