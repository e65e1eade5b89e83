"""Runs requests one step at a time and returns token deltas. Synchronous and single-threaded.

The engine does not handle text, HTTP, devices or ranks: an executor turns step plans into tokens.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator

from moe_serve.cache.events.change_record import IGNORE_PAGES, PageListener
from moe_serve.cache.page_times import SampledPages
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.execute.step_executor import ExecutorLostError, StepExecutor
from moe_serve.engine.execute.step_outcome import (
    DEADLINE_EXCEEDED,
    NAN,
    TOO_COSTLY,
    RowFailure,
    StepOutcome,
    delta_of,
)
from moe_serve.engine.leaving import LeavingSequences
from moe_serve.engine.moving import MovingSequences
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sequence import Schedule, Sequence, StopRule, sequences_of
from moe_serve.engine.request.stats import EngineCounts, EngineStats
from moe_serve.engine.routes.route_records import Made, RouteListeners, experts_of, made_tokens
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.engine.schedule.batcher import make_next_plan, make_step_plan
from moe_serve.engine.schedule.kv_tier import MakeTier
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.engine.schedule.policy.arrival_order import FIFO
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.engine.schedule.prefix_sharing import PrefixSharing
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.engine.schedule.step_drafts import StepDrafts
from moe_serve.engine.schedule.step_service import StepService
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.model.step_plan import StepPlan

_log = logging.getLogger(__name__)


class Engine:
    """Call `add` and `abort` for requests, and `step` while `has_work`.
    `begin_step` and `end_step` split a step, so that engines can step together. `begin_ahead` may
    begin the next step while one runs. If a sequence ends in the first of the two, its row in the
    second is computed for nothing.
    """

    def __init__(
        self,
        executor: StepExecutor,
        *,
        scheduler: SchedulerConfig,
        num_pages: int,
        page_size: int = 16,
        micro_batches: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        model_identity: bytes = b"",
        has_prefix_cache: bool = True,
        sampled_pages: SampledPages | None = None,
        listener: PageListener = IGNORE_PAGES,
        ids: Iterator[int] | None = None,
        policy: BatchPolicy = FIFO,
        routes: RouteListeners | None = None,
        drafting: Drafting | None = None,
        make_tier: MakeTier | None = None,
        window: int | None = None,
        clock: Clock = REAL_CLOCK,
        service: ServiceState | None = None,
        layered: LayeredPrefill | None = None,
    ) -> None:
        """`service` is shared by engines that step together; with None this engine has its own."""
        assert max_model_len <= num_pages * page_size, "one full sequence must fit the cache"
        cache = PrefixCache(num_pages, page_size, sampled_pages, listener)
        identity = model_identity if has_prefix_cache else None
        sharing = PrefixSharing(cache, identity, executor.finite_pages, make_tier, window)
        self._ids = itertools.count() if ids is None else ids  # sequence ids
        self.service = StepService.of(scheduler, clock, page_size, service)  # None: no tiers
        self._scheduler = Scheduler(scheduler, cache, sharing, policy, clock, self.service, layered)
        self.drafts = StepDrafts(self._scheduler, drafting, clock)
        self._policy, self._executor, self._routes = policy, executor, routes or RouteListeners()
        self._micro_batches, self.max_model_len = micro_batches, max_model_len
        self.stop_rule = StopRule(eos_token_ids, max_model_len)
        self._sequences: dict[str, Sequence] = {}
        self._pending: list[TokenDelta] = []  # not returned yet
        self._schedule: Schedule = {}  # the step that has begun
        self._ahead: Schedule = {}  # the step after it, if it has begun too
        self._ending: Schedule = {}  # the step that is being published
        self._leaving = LeavingSequences(self._scheduler, self.drafts, executor)
        self.moving = MovingSequences(self._sequences, self._scheduler, self.drafts, executor)
        self._num_steps = self._num_corrupted = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._pending)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    def add(self, request: GenerationRequest) -> None:
        """Queues a request, whose prompt the caller has found shorter than `max_model_len`."""
        assert 0 < len(request.prompt_token_ids) < self.max_model_len, "the prompt is too long"
        assert request.request_id not in self._sequences, f"{request.request_id} is running"
        self.adopt(Sequence(next(self._ids), request))

    @property
    def admission(self) -> Admission | None:
        return None if self.service is None else self.service.state.admission

    def abort(self, request_id: str) -> None:
        """Ends a request, even if this raises ExecutorLostError. Unknown ids are ignored."""
        if request_id in self._sequences:
            self._pending += [TokenDelta(request_id=request_id, finish_reason=FinishReason.ABORT)]
            self._end([self._sequences[request_id]])

    @property
    def num_seats(self) -> int:
        return self._scheduler.num_seats

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `DrivenEngine.set_waker`."""
        self._scheduler.tier.set_waker(wake)

    def stop_waiting(self) -> None:
        """See `DrivenEngine.stop_waiting`. This engine never waits."""

    def close(self) -> None:
        """See `DrivenEngine.close`."""
        self._scheduler.tier.close()
        self._scheduler.cache.listener.close()

    @property
    def num_pending_tokens(self) -> int:
        return self._scheduler.num_pending_tokens

    @property
    def progress(self) -> tuple[int, int]:
        """Number of prompt tokens read, and of tokens generated, since the start."""
        return self._num_prompt_tokens, self._num_generated_tokens

    def surrender(self) -> list[Sequence]:
        """Gives up all sequences in order of arrival. Their pages and computed state are lost."""
        sequences = sorted(self._sequences.values(), key=lambda s: s.id)
        self._scheduler.abandon(sequences)
        self._leaving.forget(sequences)
        for sequence in sequences:
            sequence.leave_engine()
        self._sequences.clear()
        self._schedule, self._ahead = {}, {}
        return sequences

    def adopt(self, sequence: Sequence) -> None:
        """Queues a sequence: a new one, or one that another engine surrendered."""
        self._sequences[sequence.request.request_id] = sequence
        self._scheduler.add(sequence)

    def step(self) -> list[TokenDelta]:
        """Schedules, runs and publishes a step."""
        plan = self.begin_step()
        return self.end_step(None if plan is None else self._try(plan, self._schedule))

    def begin_step(self, most: int | None = None, number: int | None = None) -> StepPlan | None:
        """Schedules a step and plans it in at most `most` micro-batches; None: nothing to do."""
        self._pending += [self._fail(s, TOO_COSTLY) for s in self._scheduler.overdue()]
        self._pending += [self._fail(s, DEADLINE_EXCEEDED) for s in self._scheduler.expired()]
        self._schedule = self._scheduler.schedule()
        self.drafts.begin(self._schedule)
        self._executor.clear_pages(self._scheduler.take_unproven_pages())
        self._executor.copy_pages(self._scheduler.sharing.copies)
        self._scheduler.sharing.end_copies()
        return self.make_plan(most, number) if self._schedule else None

    def make_plan(self, micro_batches: int | None = None, number: int | None = None) -> StepPlan:
        """Plans the step that has begun. `number` is that of engines which step together."""
        most, drafts = micro_batches or self._micro_batches, self.drafts.running
        plan = make_step_plan(self._schedule, most, self._policy, drafts, self._scheduler.layered)
        plan = self._routes.with_requests(plan, number or self._num_steps, self._schedule)
        return self.drafts.ask_guesses(plan)

    def begin_ahead(self) -> bool:
        """Begins the step after the running one; False if its contents are not certain yet."""
        sequences = [sequence for sequence, _ in self._schedule.values()]
        is_last = any(self.stop_rule.is_last(s, s.num_output_tokens + 1) for s in sequences)
        is_end = is_last or bool(self._leaving) or self.moving.is_leaving(self._schedule)
        if is_end or not self.drafts.allow_ahead(self._schedule):
            return False
        self._ahead = self._scheduler.follow(self._schedule) or {}
        self._executor.clear_pages(self._scheduler.take_unproven_pages())
        return bool(self._ahead)

    def make_plan_ahead(self, micro_batches: int, number: int | None = None) -> StepPlan:
        """Plans the step that has begun ahead. See `make_plan`."""
        plan = make_next_plan(self._ahead, micro_batches, self._policy)
        return self._routes.with_requests(plan, number or self._num_steps + 1, self._ahead)

    def drop_ahead(self) -> None:
        """Discards the step that has begun ahead."""
        self._ahead = {}

    @property
    def step_sequences(self) -> dict[int, Sequence]:
        """The sequences by id of the step that has begun, and of one whose end failed."""
        return sequences_of(self._ending | self._schedule)

    def end_step(self, outcome: StepOutcome | Exception | None) -> list[TokenDelta]:
        """Returns all new deltas. If it raises ExecutorLostError, `take_pending` has them."""
        if not isinstance(outcome, StepOutcome):
            self.drop_ahead()  # it needs the tokens of this step
            self._scheduler.tier.step_failed()
        schedule, self._schedule, self._ahead = self._schedule, self._ahead, {}
        self._ending = schedule
        if schedule:
            assert outcome is not None, f"{len(schedule)} sequences ran without an outcome"
            left = self._leaving.staying(schedule) if self._leaving else schedule
            if left:
                self._finish(left, outcome)
            self._num_steps += 1
            self._scheduler.step_ended(self._num_prompt_tokens + self._num_generated_tokens)
            if len(left) < len(schedule):
                self._leaving.release(schedule, left, outcome)
            self.drafts.end(schedule, getattr(outcome, "proposals", None))
        self._ending = {}  # last, so that `step_sequences` is right after a lost executor
        self._scheduler.cache.listener.step_ended()
        return self.take_pending()

    def take_pending(self) -> list[TokenDelta]:
        """Returns the deltas that were not returned yet."""
        deltas, self._pending = self._pending, []
        return deltas

    def _try(self, plan: StepPlan, schedule: Schedule) -> StepOutcome | Exception:
        """Runs a plan. An exception becomes the step's outcome, except ExecutorLostError."""
        try:
            return self._executor.run(plan, sequences_of(schedule))
        except ExecutorLostError:
            raise
        except Exception as error:
            return error

    def _finish(self, schedule: Schedule, outcome: StepOutcome | Exception) -> None:
        """Publishes a step's deltas. If the step raised, runs each of its sequences alone."""
        if isinstance(outcome, StepOutcome):
            outcome = outcome.cut(schedule, self.stop_rule)
            self._routes.notify(schedule, outcome.choices, outcome.sampled)
            self._publish(schedule, outcome)
            return
        _log.error("step %d failed: %d sequences", self._num_steps, len(schedule), exc_info=outcome)
        is_parted = self._scheduler.layered.give_up(schedule)
        schedule = self.drafts.put_off(schedule)
        if len(schedule) == 1 and not is_parted:
            why = RowFailure(f"its step failed: {outcome}")
            self._pending += [self._fail(sequence, why) for sequence, _ in schedule.values()]
            return
        for part in [{key: item} for key, item in schedule.items()]:
            plan = make_step_plan(part, 1, self._policy, layered=self._scheduler.layered)
            plan = self._routes.with_requests(plan, self._num_steps, part)
            self._finish(part, self._try(plan, part))

    def stats(self) -> EngineStats:
        own = EngineCounts(
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_corrupted=self._num_corrupted,
            drafts=self.drafts.counts,
        )
        return EngineStats(
            num_steps=self._num_steps,
            load=self._scheduler.load,
            counts=self._scheduler.counts + own,
            tier=self._scheduler.tier.stats(),
            expert_memory=self._executor.expert_memory,
            batching=self._policy.stats(),
            service=None if self.service is None else self.service.stats(),
        )

    def check_integrity(self) -> None:
        """Asserts that pages, reference counts, page tables and requests agree."""
        scheduler, known = self._scheduler, {s.id for s in self._sequences.values()}
        scheduler.check_integrity()
        scheduled = {s.id for s in (*scheduler.running, *scheduler.waiting)} - self._leaving.ids
        assert known == scheduled, f"requests {known ^ scheduled} are lost"

    def _publish(self, schedule: Schedule, outcome: StepOutcome) -> None:
        """Advances sequences, adds their deltas, then ends some, which may lose the executor."""
        ended, made = [], made_tokens(schedule, outcome.choices, outcome.sampled)
        self._scheduler.mask_share.charge(outcome.mask_costs, (s for s, _ in schedule.values()))
        for key, (sequence, count) in schedule.items():
            if self._scheduler.layered.parks(sequence, count):
                if key in outcome.failures:
                    self._pending.append(self._fail(sequence, outcome.failures[key]))
                continue
            self._num_prompt_tokens += sequence.num_unread(count)
            sequence.prompt_logprobs += outcome.prompt_logprobs.get(key, ())
            sequence.num_computed_tokens += count
            sequence.is_proven = False
            if sequence.num_pending_tokens == 0 and self._advance(sequence, outcome, made):
                ended.append(sequence)
        self.drafts.give_back(schedule, outcome.spoiled)
        self._end(ended)

    def _advance(self, sequence: Sequence, outcome: StepOutcome, made: Made) -> bool:
        """Appends a sequence's run and returns whether it has ended. A failed one ends in here."""
        run, failure = outcome.run_of(sequence.id)
        if run:
            self._pending.append(self._append(sequence, run, made))
            if self._pending[-1].finish_reason is not None:
                return True
        if failure is not None:
            self._pending.append(self._fail(sequence, failure))
        return False

    def _append(self, sequence: Sequence, run: tuple[Sampled, ...], made: Made) -> TokenDelta:
        assert len(run) == 1 or not self._schedule, "a step began ahead of a run of tokens"
        prompt_logprobs = sequence.take_prompt_logprobs()
        sequence.is_proven = True
        for sampled in run:
            sequence.append(sampled.token_id)
        sequence.num_computed_tokens += len(run) - 1
        self._num_generated_tokens += len(run)
        reason = self.stop_rule.reason(sequence, run[-1].token_id, sequence.num_output_tokens)
        experts = experts_of(sequence, made, len(run))
        drafted = self.drafts.result(sequence, len(run)) if self.drafts.running else None
        if self.service is not None:
            self.service.got_tokens(sequence, reason)
        return delta_of(sequence, run, reason, prompt_logprobs, experts, drafted)

    def _end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            del self._sequences[sequence.request.request_id]
        self._leaving.end(sequences, self._schedule)

    def _fail(self, sequence: Sequence, failure: RowFailure) -> TokenDelta:
        self._num_corrupted += failure == NAN
        del self._sequences[sequence.request.request_id]
        return self._leaving.fail(sequence, failure, self._schedule)
