"""Keeps the targets of service tiers in a scheduler. Without tiers a scheduler has no such
object."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.request.service_stats import ServiceStats
from moe_serve.engine.schedule.urgency import Urgency
from moe_serve.engine.service.preemption import Preemption
from moe_serve.engine.service.service_queue import ServiceQueue, standing_of
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.engine.service.step_model import StepWork


@dataclass(frozen=True, slots=True)
class _BegunService:
    """A step that has begun: its rows, its start time, and the tokens that it adds to the engine's
    count."""

    rows: StepWork
    at: float
    num_tokens: int


class TierUrgency(Urgency):
    """The rule of a server with tiers. With the orders `edf` and `atc` the deadlines decide. With
    `fifo` and `priority` it is `Urgency`, and the tiers only count for reports."""

    def __init__(self, step_s: float, queue: ServiceQueue, preemption: Preemption) -> None:
        super().__init__(0.0 if queue.state.order_name == "fifo" else step_s)
        self._queue, self._preemption = queue, preemption
        self._has_levels = queue.state.order_name != "fifo"
        self.is_strict = not queue.is_ordered

    def level(self, sequence: Sequence) -> int:
        return sequence.request.priority if self._has_levels else 0

    def joined(self, sequence: Sequence) -> None:
        self._queue.joined(sequence)

    def left(self, sequence: Sequence) -> None:
        self._queue.left(sequence)

    def groups(
        self, line: Items[Sequence], levels: Collection[int], now: float
    ) -> Iterator[Items[Sequence]]:
        """See `Urgency.groups`. Groups of `edf` and `atc` are in the order of reading time."""
        if self.is_strict:
            return super().groups(line, levels, now)
        return self._queue.groups()

    def groups_before(self, until: float) -> Iterator[Items[Sequence]]:
        return self._queue.groups(until)

    def in_step(self, running: Items[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        decoding, reading = super().in_step(running)
        if not self.is_strict and len(reading) > 1:
            reading, _ = self._queue.reading_order(reading)
        return decoding, reading

    def victim(self, running: Items[Sequence]) -> Sequence:
        if self.is_strict:
            return super().victim(running)
        return self._preemption.for_pages(running)


class StepService:
    """The service of one engine. With `is_lockstep`, a coordinator steps several engines and
    measures their steps; otherwise this engine measures its own.
    """

    def __init__(
        self, state: ServiceState, engine: int, page_size: int, *, is_lockstep: bool
    ) -> None:
        self.state, self._is_lockstep = state, is_lockstep
        self.queue = ServiceQueue(state, engine, page_size)
        self._preemption = Preemption(self.queue)
        config = state.config
        self.urgency = TierUrgency(config.max_passed_over_s, self.queue, self._preemption)
        self._begun: deque[_BegunService] = deque()  # steps under way, in order
        self._ended_at = 0.0
        self._running: Items[Sequence] = ()  # the scheduler's own list
        self._num_tokens = 0  # that the engine had computed when the last step ended

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        clock: Clock,
        page_size: int,
        shared: ServiceState | None = None,
    ) -> StepService | None:
        """Returns the service of an engine; None for a server without tiers. `shared` is the state
        of engines that step together."""
        state = ServiceState.of(config, clock) if shared is None else shared
        if state is None:
            return None
        return cls(state, state.policy.next_engine(), page_size, is_lockstep=shared is not None)

    def enter(self, sequence: Sequence, num_cached: int) -> None:
        """Notes a sequence that will wait: a new one, or one that another engine surrendered."""
        num_left = sequence.num_tokens - num_cached
        if sequence.standing is None:
            self.state.enter(sequence, num_left)
        else:
            self.state.take_over(sequence)
            sequence.standing.num_left = num_left

    def restart(self, sequence: Sequence, num_cached: int) -> None:
        """Notes a preempted sequence that will wait."""
        standing = standing_of(sequence)
        standing.num_left = sequence.num_tokens - num_cached
        if standing.is_runaway:
            standing.put_back(self.state.steady())

    def leave(self, sequence: Sequence, *, had_seat: bool, is_end: bool) -> None:
        """Notes a sequence that has ended, or that goes to another engine with its standing."""
        if had_seat:
            self.queue.freed_seat()
        if is_end:
            self.state.policy.leave(sequence)

    def abandon(self, waiting: Iterable[Sequence]) -> None:
        """Forgets the waiting sequences, as they go to other engines with their standings."""
        for sequence in list(waiting):
            self.queue.left(sequence)
        self.queue.withdraw()

    def begin_step(self) -> None:
        """Prepares for a step that is about to be scheduled."""
        self.queue.begin_step(self._running)

    def order(self) -> Sequence | None:
        """Orders the waiting sequences anew and returns the most urgent one."""
        self.queue.begin_step(self._running)
        first = self.queue.first()
        return None if first is None else first[1]

    def num_tokens(self, decoding: Items[Sequence]) -> int:
        """Returns the token budget of a step in which these sequences decode."""
        most = self.state.config.max_batched_tokens
        num_prompt = self.queue.num_prompt_tokens(decoding, max(0, most - len(decoding)))
        return min(most, len(decoding) + num_prompt)

    def split(self, reading: list[Sequence]) -> tuple[list[Sequence], list[Sequence], float]:
        """Returns the prompts that continue before any waiting sequence starts; those that yield to
        waiting ones that are more urgent by a bucket; and the key up to which these start first.
        `reading` is in the order of `TierUrgency.in_step`."""
        may_pass = self.queue.is_ordered and not self.queue.is_calm
        first = self.queue.first() if reading and may_pass else None
        if first is None:
            return reading, [], 0.0
        keys = self.queue.reading_keys(reading)
        limits = [key - self.state.order.bucket_s for key in keys]
        place = next((i for i, limit in enumerate(limits) if limit > first[0]), len(reading))
        return reading[:place], reading[place:], limits[place] if place < len(reading) else 0.0

    def seat_victim(self, running: Items[Sequence], share_lost: float) -> Sequence | None:
        """Returns the running sequence that gives its seat to a waiting one, or None. `share_lost`:
        see `Preemption.for_seat`."""
        found = self._preemption.for_seat(running, share_lost)
        if found is None:
            return None
        newcomer, victim = found
        self.queue.put_first(newcomer)
        standing = standing_of(victim)
        standing.num_urgent_preemptions += not standing.is_runaway  # which `restart` counts
        self.state.ledger.add(standing.tier, "num_urgent_preemptions")
        return victim

    def is_due(self, running: Items[Sequence]) -> bool:
        """Returns whether a step must be scheduled anew: a sequence may have to end or to yield."""
        return self._preemption.may_preempt(running) or bool(self.queue.expired(running))

    def expired(self, running: Items[Sequence]) -> list[Sequence]:
        """Returns the strict sequences whose deadlines have passed, which the engine then ends."""
        found = self.queue.expired(running)
        for sequence in found:
            self.state.policy.expired(sequence)
        return found

    def step_begins(self, schedule: Schedule, running: Items[Sequence]) -> None:
        """Notes the contents of a step, and charges the tenants for it."""
        if not schedule:
            return
        num_decoding = num_prompt = num_context = num_tokens = 0
        places: list[int] = []
        for sequence, count in schedule.values():
            num_computed, length = sequence.num_computed_tokens, len(sequence.token_ids)
            if count == 1:
                num_decoding += 1
                num_context += length
            else:
                num_prompt += count
            if num_computed < sequence.num_prompt_tokens:
                num_tokens += sequence.num_unread(count)
            num_tokens += num_computed + count == length
            places.append(standing_of(sequence).tenant)
        self.queue.charge(places, [count for _, count in schedule.values()])
        rows = StepWork(num_decoding, num_prompt, num_context)
        self._begun.append(_BegunService(rows, self.state.clock(), num_tokens))
        state = self.state
        seconds = state.usual_step_s if self._is_lockstep else state.model.seconds(rows)
        self.queue.step_begun(running, schedule, seconds, is_ahead=len(self._begun) > 1)

    def step_ended(self, running: Items[Sequence], num_tokens: int, *, has_work: bool) -> None:
        """Learns from the oldest step under way. `num_tokens`: computed by the engine so far."""
        now = self.state.clock()
        begun = self._begun.popleft() if self._begun else None
        num_new, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        self._running = running
        if begun is not None:
            is_typical = num_new == begun.num_tokens  # otherwise the step failed, or it had drafts
            if self._is_lockstep:
                self.state.add_rows(begun.rows, is_typical=is_typical)
            elif is_typical:
                self.state.observe(begun.rows, now - max(begun.at, self._ended_at))
        self._ended_at = now
        if not self._is_lockstep:
            self.state.turn(has_work=has_work)
        self.queue.step_ended(running, has_work=has_work)

    def got_tokens(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Notes that a sequence got tokens, and why it ended, if it did. Tokens between the first
        and the last one are not noted, unless the answer has become a runaway.
        """
        standing = sequence.standing
        if standing is None:
            return
        if sequence.num_output_tokens >= standing.output_limit and not standing.is_runaway:
            standing.is_runaway = True
            self.state.ledger.add(standing.tier, "num_runaways")
        if reason is None and standing.first_token_at is not None:
            return
        now = self.state.clock()
        self.state.policy.got_token(sequence, now)
        if reason is not None:
            self.state.policy.finished(sequence, now)

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences that have one token left to compute."""
        return [s for s in self._running if s.num_pending_tokens == 1]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that the next step could read here, as far as its budget goes."""
        reading = sum([s.num_pending_tokens for s in self._running if s.num_pending_tokens > 1])
        waiting = 0
        if len(self._running) < self.state.config.max_num_seqs:
            waiting = int(self.queue.table.num_left.sum())
        return min(reading + waiting, self.state.config.max_batched_tokens)

    def predicted_s(self, sequence: Sequence) -> float:
        """Returns the predicted seconds to the first token of a sequence that would wait here."""
        return sum(self.forecast_s(sequence, sequence.num_tokens))

    def forecast_s(self, sequence: Sequence, num_left: int) -> tuple[float, float]:
        """Predicts the seconds until the reading of a sequence that would wait here begins, and
        those that the reading takes. `num_left` of its tokens are not cached here.
        """
        state, request, standing = self.state, sequence.request, sequence.standing
        service = request.service
        if standing is None:
            slack_s = state.admission.slack_s(service, request.priority)
        else:
            slack_s = standing.deadline_s - standing.clock()
        work_s = num_left * state.token_s
        keys_at = state.order.keys_over_time(
            slack_s - work_s, work_s, service.weight, request.priority
        )
        snapshot = self.queue.snapshot(self._running)
        read_s = snapshot.read_s(num_left)
        return max(0.0, snapshot.first_token_s(num_left, keys_at) - read_s), read_s

    def movable(self, most: int) -> list[Sequence]:
        """Returns up to `most` waiting sequences that may go to another rank: the most urgent ones
        of those that never ran."""
        return self.queue.fresh(most)

    def stats(self) -> ServiceStats | None:
        """Returns a snapshot; None if a coordinator has that of all engines."""
        return None if self._is_lockstep else self.state.policy.stats()

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Asserts that the service knows the waiting sequences."""
        self.queue.check_integrity(waiting)
