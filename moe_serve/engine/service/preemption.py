"""Decides on preemption among the sequences of an engine. `victims.py` has the rules."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.service_queue import ServiceQueue, standing_of
from moe_serve.engine.service.victims import Candidate, Newcomer, cheapest, for_urgent


class Preemption:
    """The decisions for one engine with service tiers."""

    def __init__(self, queue: ServiceQueue) -> None:
        self._queue, self._state = queue, queue.state
        self._demotes = any(
            tier.predicted_output_limit is not None and tier.runaways == "demote"
            for tier in queue.state.config.tiers
        )
        self.is_urgent = queue.is_ordered and queue.state.config.preempt == "deadline"

    def for_pages(self, running: Items[Sequence]) -> Sequence:
        """Returns the running sequence that gives its pages back."""
        candidates = [self._candidate(sequence, share_lost=1.0) for sequence in running]
        return running[cheapest(candidates, self._away_s(running))]

    def for_seat(
        self, running: Items[Sequence], share_lost: float
    ) -> tuple[Sequence, Sequence] | None:
        """Returns a waiting sequence that should start at once and the running one that gives it
        its seat, or None. `share_lost` is the share of a victim's pages that others will probably
        take before it is back.
        """
        newcomer = self._newcomer(running)
        if newcomer is None:
            return None
        if (runaway := self._runaway(running)) is not None:
            return newcomer, runaway
        budget = max(1, self._state.config.max_batched_tokens)
        standing, state = standing_of(newcomer), self._state
        latest_s = standing.deadline_s - state.steady() - standing.num_left * state.token_s
        wanted = Newcomer(
            weight=newcomer.request.service.weight,
            slack_s=latest_s,
            num_steps=-(-standing.num_left // budget),
        )
        by_id = {sequence.id: sequence for sequence in running}
        candidates = ((s.id, self._candidate(s, share_lost)) for s in running)
        found = for_urgent(wanted, candidates, self._away_s(running))
        return None if found is None else (newcomer, by_id[found])

    def may_preempt(self, running: Items[Sequence]) -> bool:
        """Returns whether some waiting sequence might get a seat from a running one."""
        if len(self._queue.table) <= self._queue.table.num_preempted:
            return False
        return self.is_urgent or self._runaway(running) is not None

    def _runaway(self, running: Items[Sequence]) -> Sequence | None:
        """Returns the running sequence with the longest runaway answer that may still be
        preempted for a waiting one."""
        if not self._demotes:
            return None
        found = [s for s in running if standing_of(s).may_yield]
        return max(found, key=lambda s: (s.num_output_tokens, -s.id), default=None)

    def _newcomer(self, running: Items[Sequence]) -> Sequence | None:
        """Returns the most urgent waiting sequence that never ran."""
        table = self._queue.table
        if not self.may_preempt(running):
            return None
        if not table.num_preempted:
            first = self._queue.first()
            return None if first is None else first[1]
        keys = self._queue.keys()
        keys[table.is_preempted] = math.inf
        return table.sequences[int(keys.argmin())]

    def _away_s(self, running: Items[Sequence]) -> float:
        """Returns how long a preempted sequence waits for a seat, behind earlier ones. Until some
        answers have ended, the shortest one is the estimate.
        """
        seat_s = self._queue.seat_s
        if math.isinf(seat_s):
            seat_s = min([self._num_left(s) for s in running]) * self._state.step_s
        return seat_s * (1 + self._queue.table.num_preempted)

    def _candidate(self, sequence: Sequence, share_lost: float) -> Candidate:
        standing = standing_of(sequence)
        num_left = self._num_left(sequence)
        return Candidate(
            weight=sequence.request.service.weight,
            slack_s=self._slack_s(sequence, num_left),
            again_s=sequence.num_computed_tokens * self._state.token_s * share_lost,
            num_pages=len(sequence.page_table),
            num_left=num_left,
            num_urgent_preemptions=standing.num_urgent_preemptions,
        )

    def _num_left(self, sequence: Sequence) -> int:
        """Returns how many tokens the answer probably still has."""
        expected = self._state.lengths.p90(sequence, standing_of(sequence).tier)
        num_left = int(expected) - sequence.num_output_tokens
        most = sequence.rules.max_tokens
        if most is not None:
            num_left = min(num_left, most - sequence.num_output_tokens)
        return max(1, num_left)

    def _slack_s(self, sequence: Sequence, num_left: int) -> float:
        """Returns the seconds that a running sequence may lose without missing a target."""
        standing, state = standing_of(sequence), self._state
        if standing.may_yield:
            return math.inf
        targets = sequence.request.service.targets
        slack_s, left_s = math.inf, num_left * state.step_s
        if standing.first_token_at is None:
            reading_s = sequence.num_pending_tokens * state.token_s
            return standing.deadline_s - state.steady() - reading_s
        now = state.clock()
        if targets.e2e_s is not None:
            slack_s = sequence.request.arrival_time + targets.e2e_s - now - left_s
        if targets.tpot_s is not None:
            allowed_s = targets.tpot_s * (sequence.num_output_tokens - 1 + num_left)
            slack_s = min(slack_s, allowed_s - (now - standing.first_token_at) - left_s)
        return slack_s
