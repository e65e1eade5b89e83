"""Chooses the sequences of the next step and how many tokens each computes.

Prompts and answers follow one rule: every running sequence has tokens that are not computed yet,
and a step computes some of them under a token budget. Sequences with one token left (decode) go
first, then prompts that are being read, then waiting sequences. `Urgency` decides the order of each
kind. Without service tiers, a running sequence is never preempted for a more urgent one. When pages
run out, the least urgent running sequence gives its pages back and waits, ahead of all equally
urgent ones, to be computed again.

A sequence starts with its cached tokens. If a running sequence is computing its next page, it waits
for that page, and those behind it may start first. The batch policy may also let others go first,
within bounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.request.stats import EngineCounts, EngineLoad
from moe_serve.engine.request.step_tokens import StepTokenCounter
from moe_serve.engine.sampling.mask_share import MaskShare
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.prefix_sharing import PrefixSharing
from moe_serve.engine.schedule.reservations import Reservation, Reservations
from moe_serve.engine.schedule.starter import Starter
from moe_serve.engine.schedule.step_service import StepService
from moe_serve.engine.schedule.urgency import Urgency
from moe_serve.engine.schedule.waiting_queue import WaitingQueue


class Scheduler:
    """Owns the waiting and running sequences and their page tables."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        sharing: PrefixSharing,
        policy: BatchPolicy,
        clock: Clock,
        service: StepService | None = None,
        layered: LayeredPrefill | None = None,
        urgency: Urgency | None = None,
    ) -> None:
        """`urgency` replaces the configured rule. `service` exists only with service tiers."""
        self._config, self.cache, self.sharing, self.policy = config, cache, sharing, policy
        self.service, self.tier, self._clock = service, sharing.tier, clock
        tiers = Urgency(config.max_passed_over_s) if service is None else service.urgency
        self.urgency = urgency = tiers if urgency is None else urgency
        self.waiting = WaitingQueue(urgency, clock)
        self.running: list[Sequence] = []  # in the order in which they started
        self.reservations = Reservations(cache, sharing, self.running, config.max_num_seqs)
        self.layered = LayeredPrefill(None, "off", 0, 0) if layered is None else layered
        self.starter = Starter(
            self.waiting,
            self.running,
            self.layered,
            sharing,
            policy,
            clock,
            cache=cache,
            reservations=self.reservations,
            is_strict=urgency.is_strict,
        )
        self.mask_share = MaskShare(config.max_held_s, clock)
        self.num_preemptions = self._num_left = 0  # _num_left: of the last step's budget
        self.step_tokens = StepTokenCounter()
        self._unproven_pages: list[int] = []

    @property
    def num_seats(self) -> int:
        return self._config.max_num_seqs

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.tier.has_work)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that all sequences still have to compute."""
        return sum(s.num_pending_tokens for s in (*self.running, *self.waiting))

    @property
    def load(self) -> EngineLoad:
        """The requests and pages of now. Safe from any thread."""
        first = self.waiting.line.first
        return EngineLoad(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_left_aside=len(self.starter.skipped),
            num_pages=self.cache.num_pages,
            num_free_pages=self.cache.num_available,
            num_cached_pages=self.cache.num_cached,
            oldest_arrival=None if first is None else first.request.arrival_time,
        )

    @property
    def counts(self) -> EngineCounts:
        """The counts of the scheduler and the cache since the start. Safe from any thread."""
        return EngineCounts(
            num_preemptions=self.num_preemptions,
            num_evicted_pages=self.cache.num_evicted,
            num_queried_tokens=self.sharing.num_queried_tokens,
            num_hit_tokens=self.sharing.num_hit_tokens,
            num_missed_tokens=self.starter.num_missed_tokens,
            page_times=self.cache.sampled.snapshot(),
            step_tokens=self.step_tokens.snapshot(),
        )

    def add(self, sequence: Sequence) -> None:
        sequence.page_size = self.cache.page_size
        self.sharing.register(sequence)
        if self.service is not None:
            self.service.enter(sequence, self.sharing.num_cached_tokens(sequence))
        self.waiting.add(sequence)

    def remove(self, sequences: Iterable[Sequence], *, is_end: bool = True) -> None:
        """Removes sequences, running or waiting. Pages proven by a valid token stay cached if their
        values are finite; the others are freed. `is_end` False: they go to another engine."""
        if not (sequences := list(sequences)):
            return
        self.sharing.give((s for s in sequences if s.is_proven), is_end=True)
        for sequence in sequences:
            if had_seat := sequence.is_running:
                self._stop(sequence)
            else:
                self.waiting.remove(sequence)
            self._release(sequence)
            if self.service is not None:
                self.service.leave(sequence, had_seat=had_seat, is_end=is_end)
        self.starter.skipped.forget(sequences)
        self.mask_share.forget(sequences)
        self.policy.forget(s.id for s in sequences)

    def depart(self, sequence: Sequence) -> Reservation:
        """Lets a running sequence go to another engine. Its full pages stay in the tree, and all
        are kept until it has arrived there."""
        self.sharing.give([sequence])
        self._stop(sequence)
        self.sharing.stop_computing(sequence)
        self.mask_share.forget([sequence])
        self.policy.forget([sequence.id])
        if self.service is not None:
            self.service.leave(sequence, had_seat=True, is_end=False)
        return self.reservations.keep(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Removes a failed sequence. The pages it computed leave the cache too, except those that
        other sequences already use."""
        own = sequence.page_table[sequence.num_found_pages : sequence.num_shared_pages]
        sequence.is_proven = False
        self.remove([sequence])
        self._unproven_pages += self.cache.forget(own)

    def abandon(self, sequences: Iterable[Sequence]) -> None:
        """Forgets sequences that leave with what was computed, as their rank is lost."""
        self.policy.forget(s.id for s in (*sequences, *self.running))
        self.tier.abandon()
        self.reservations.forget()
        if self.service is not None:
            self.service.abandon(self.waiting)

    def schedule(self) -> Schedule:
        """Chooses the step's sequences and gives them the pages that they need."""
        if self.sharing.is_due:
            self.sharing.give(self.running)
        self._unproven_pages += self.sharing.drop_hidden(self.running)
        self.tier.update()
        self.policy.prepare(self.waiting.line, self.running)
        self.layered.begin()
        if self.service is not None:
            self.service.begin_step()
            self._yield_seat()
        chosen: Schedule = {}
        num_preempted = self.num_preemptions
        decoding, reading = self.urgency.in_step(self.running)
        has_waiting = bool(self.waiting)
        is_alone = not (reading or has_waiting and self.starter.has_seat)
        decoding = self.mask_share.affordable(decoding, is_alone=is_alone)
        most, later, until = self._config.max_batched_tokens, list[Sequence](), 0.0
        if self.service is not None:
            most = self.service.num_tokens(decoding)
            if has_waiting and self.starter.has_seat:
                reading, later, until = self.service.split(reading)
        budget = self._serve((*decoding, *reading), most, most, chosen)
        if later:
            if self.num_preemptions == num_preempted:
                budget = self.starter.admit(budget, chosen, until)
            budget = self._serve(later, budget, most, chosen)
        if has_waiting and self.num_preemptions == num_preempted:
            self.starter.admit(budget, chosen)
        self._num_left, costs = self.layered.left(most, chosen), self.layered.costs(chosen)
        if self.service is not None:
            self.service.step_begins(costs, self.running)
        self.tier.step_begins(costs)
        return chosen

    def _serve(self, line: Iterable[Sequence], budget: int, most: int, chosen: Schedule) -> int:
        """Gives running sequences their tokens and pages, as far as the budget allows. Returns the
        rest of the budget. `most` is the budget of the whole step."""
        num_preempted = self.num_preemptions
        for sequence in line:
            share = self.layered.share(sequence, budget, chosen)
            if share.count and self._make_room(sequence, share.count, chosen):
                chosen[sequence.id] = (sequence, share.count)
                budget -= self.layered.take(sequence, share)
            if self.num_preemptions > num_preempted:  # the victims' budget is free again
                budget = self.layered.left(most, chosen)
        return budget

    def _yield_seat(self) -> None:
        """Lets a running sequence wait for a more urgent one that has no seat."""
        if self.service is None or not self.waiting or self.starter.has_seat:
            return
        share_lost = 1 - self.cache.num_available / max(1, self.cache.num_pages)
        if victim := self.service.seat_victim(self.running, share_lost):
            self._preempt(victim, {})

    def step_ended(self, num_tokens: int) -> None:
        """Notes the end of the last step. `num_tokens` were computed since the start."""
        self.step_tokens.count_to(num_tokens)
        self.tier.step_ended()
        if self.service is not None:
            self.service.step_ended(self.running, num_tokens, has_work=self.has_work)

    def overdue(self) -> list[Sequence]:
        """Returns running sequences whose costly grammars hold seats that others need."""
        if not self.waiting or self.starter.has_seat:
            return []
        return self.mask_share.overdue(self.running, len(self.waiting))

    def expired(self) -> list[Sequence]:
        """Returns strict sequences whose deadlines have passed."""
        return [] if self.service is None else self.service.expired(self.running)

    @property
    def num_spare_rows(self) -> int:
        """Rows that drafts may add to the last schedule; 0 if half of its budget is taken."""
        budget = self._config.max_batched_tokens
        return self._num_left if 2 * self._num_left >= budget else 0

    def follow(self, schedule: Schedule) -> Schedule | None:
        """Schedules the step after `schedule` while that one runs, with pages for it; None if it is
        uncertain.

        It is certain if all running sequences are in the step and get a token from it, there are
        pages for these tokens, and no waiting sequence could start.
        """
        is_open = self.layered.is_busy or self.waiting and self.starter.has_seat
        is_copying = self.sharing.is_due or self.tier.is_behind
        if len(schedule) != len(self.running) or is_open or is_copying:
            return None
        if self.service is not None and self.service.is_due(self.running):
            return None
        sequences = [s for s, _ in schedule.values()]
        is_reading = any(count != s.num_pending_tokens for s, count in schedule.values())
        if is_reading or self.sharing.must_detach(sequences):
            return None
        missing = sum(max(0, s.num_missing_pages(s.num_tokens + 1)) for s in sequences)
        if missing > self.cache.num_available or not self.mask_share.can_afford(sequences):
            return None
        self._unproven_pages += self.sharing.drop_hidden(sequences)
        self.policy.prepare(self.waiting.line, self.running)
        for sequence in sequences:
            self._grow(sequence, sequence.num_pending_tokens + 1)
        following = {s.id: (s, 1) for s in sequences}
        if self.service is not None:
            self.service.step_begins(following, self.running)
        return following

    def _make_room(self, sequence: Sequence, count: int, chosen: Schedule) -> bool:
        """Allocates pages for `count` more tokens, preempting the least urgent. Returns False if
        that is the sequence itself."""
        if not sequence.is_running:
            return False  # preempted just now
        needed = sequence.num_missing_pages(sequence.num_computed_tokens + count)
        if needed <= 0:
            return True
        if needed > self.cache.num_available:
            self._unproven_pages += self.sharing.free_behind_window(self.running)
        while needed > self.cache.num_available:
            victim = self.urgency.victim(self.running)
            self._preempt(victim, chosen)
            if victim is sequence:
                return False
        self._grow(sequence, count)
        return True

    def _grow(self, sequence: Sequence, count: int) -> None:
        missing = sequence.num_missing_pages(sequence.num_computed_tokens + count)
        sequence.page_table += self.cache.allocate(max(0, missing))

    def _preempt(self, victim: Sequence, chosen: Schedule) -> None:
        # Pages that stay cached need not be computed again; the last page is checked too.
        self.sharing.give([victim], is_end=True)
        self._stop(victim)
        self._release(victim)
        victim.restart()
        victim.num_preemptions += 1
        if self.service is not None:
            self.service.restart(victim, self.sharing.num_cached_tokens(victim))
        self.waiting.put_back(victim)
        chosen.pop(victim.id, None)
        self.num_preemptions += 1

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """See `PrefixSharing.truncate`. To be called between steps, for a running sequence."""
        self._unproven_pages += self.sharing.truncate(sequence, num_tokens)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.is_running = False

    def take_unproven_pages(self) -> list[int]:
        """Returns freed pages whose values no sampled token has proven, so they may hold NaNs.
        Leaves out pages in the tree: a tier fills them, and clearing would come after that."""
        pages, self._unproven_pages = self._unproven_pages, []
        return [page for page in pages if page not in self.cache.tree]

    def add_unproven(self, pages: Iterable[int]) -> None:
        """Adds freed pages whose contents are undefined."""
        self._unproven_pages += pages

    def _release(self, sequence: Sequence) -> None:
        self.sharing.stop_computing(sequence)
        freed = self.cache.release(sequence.held_pages)
        sequence.page_table = []
        if not (sequence.is_proven and sequence.is_sound):
            self._unproven_pages += freed

    def check_integrity(self) -> None:
        """Asserts that pool, tree and tables agree, and that only running sequences hold pages."""
        held = [*(s.held_pages for s in self.running), *self.reservations.tables]
        self.cache.check_integrity(held)
        self.sharing.check_integrity(self.running)
        self.reservations.check_integrity()
        self.waiting.check_integrity()
        self.starter.skipped.check_integrity(self.waiting)
        if self.service is not None:
            self.service.check_integrity(self.waiting)
        for sequence in self.waiting:
            assert not sequence.page_table, f"waiting sequence {sequence.id} holds pages"
        for sequence in self.running:
            covered = -sequence.num_missing_pages(sequence.num_computed_tokens)
            assert covered >= 0, f"sequence {sequence.id} lacks {-covered} pages"
