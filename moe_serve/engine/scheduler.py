"""Who runs in the next step, and how many tokens of each.

One rule for prompts and answers alike: every running sequence has tokens that are not computed yet,
and a step computes some of them under a token budget. Sequences with one token left (decode) go
first, then prompts in order of arrival, then new arrivals. When pages run out, the sequence that
arrived last gives its pages back and waits to be computed again.
"""

from __future__ import annotations

from collections import deque

from moe_serve.cache.page_pool import PagePool
from moe_serve.config import SchedulerConfig
from moe_serve.engine.sequence import Sequence

Schedule = dict[int, tuple[Sequence, int]]  # sequence id -> (sequence, tokens to compute)


class Scheduler:
    """Owns the waiting and running sequences and their page tables."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self._config, self.pool = config, pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self._unproven_pages: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages."""
        if sequence.is_running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> Schedule:
        """Choose the step's sequences and give them the pages that they need."""
        chosen: Schedule = {}
        budget = self._config.max_batched_tokens
        num_preempted = self.num_preemptions
        decoding = [s for s in self.running if s.num_pending_tokens == 1]
        reading = [s for s in self.running if s.num_pending_tokens > 1]
        for sequence in (*decoding, *reading):
            count = min(sequence.num_pending_tokens, budget)
            if count and self._make_room(sequence, count, chosen):
                chosen[sequence.id] = (sequence, count)
                budget = self._config.max_batched_tokens - sum(n for _, n in chosen.values())
        if self.num_preemptions == num_preempted:
            self._admit(budget, chosen)
        return chosen

    def _admit(self, budget: int, chosen: Schedule) -> None:
        """Start waiting sequences while there is budget, a seat, and pages for the whole prompt."""
        while self.waiting and budget and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.num_missing_pages(sequence.num_tokens + 1) > self._num_unpromised_pages():
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.is_running = True
            count = min(sequence.num_pending_tokens, budget)
            self._grow(sequence, count)
            chosen[sequence.id] = (sequence, count)
            budget -= count

    def _num_unpromised_pages(self) -> int:
        """Free pages less those that running prompts will still take."""
        promised = sum(max(0, s.num_missing_pages(s.num_tokens)) for s in self.running)
        return self.pool.num_free - promised

    def _make_room(self, sequence: Sequence, count: int, chosen: Schedule) -> bool:
        """Pages for `count` more tokens, at the cost of the latest arrivals; False if it is one."""
        if not sequence.is_running:
            return False  # preempted a moment ago
        needed = sequence.num_missing_pages(sequence.num_computed_tokens + count)
        while needed > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, chosen)
            if victim is sequence:
                return False
        self._grow(sequence, count)
        return True

    def _grow(self, sequence: Sequence, count: int) -> None:
        missing = sequence.num_missing_pages(sequence.num_computed_tokens + count)
        if missing > 0:
            sequence.page_table += self.pool.allocate(missing)

    def _preempt(self, victim: Sequence, chosen: Schedule) -> None:
        self._stop(victim)
        self._release(victim)
        victim.restart()
        self.waiting.appendleft(victim)
        chosen.pop(victim.id, None)
        self.num_preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.is_running = False

    def take_unproven_pages(self) -> list[int]:
        """Freed pages whose values no sampled token has vouched for: a NaN may lie there."""
        pages, self._unproven_pages = self._unproven_pages, []
        return pages

    def _release(self, sequence: Sequence) -> None:
        freed = self.pool.release(sequence.page_table)
        sequence.page_table = []
        if not sequence.is_proven:
            self._unproven_pages += freed

    def check_integrity(self) -> None:
        """The pool and the tables agree, and only running sequences hold pages."""
        self.pool.check_integrity(s.page_table for s in self.running)
        for sequence in self.waiting:
            assert not sequence.page_table, f"waiting sequence {sequence.id} holds pages"
        for sequence in self.running:
            covered = -sequence.num_missing_pages(sequence.num_computed_tokens)
            assert covered >= 0, f"sequence {sequence.id} lacks {-covered} pages"
