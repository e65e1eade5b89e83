"""Holds what all engines of a server share: measured times, shares, counts and the forecast.

Attention ranks have an engine each. They run in lockstep, so the time of a step depends on the rows
of all of them.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from moe_serve.cache.histogram import HistogramCounter
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_stats import DECISION_BOUNDS, ServiceStats
from moe_serve.engine.request.service_terms import Service
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.answer_lengths import AnswerEnds, AnswerLengths, TierLengths
from moe_serve.engine.service.arrivals import RecentArrivals
from moe_serve.engine.service.forecast_calibration import Factors, ForecastCalibration, error_of
from moe_serve.engine.service.ledger import Ledger
from moe_serve.engine.service.lengths.predicted_lengths import predicted_lengths
from moe_serve.engine.service.order import (
    BY_DEADLINE,
    StartOrder,
    bucket_of,
    check_order,
    resolved_order,
    rule_of,
)
from moe_serve.engine.service.shares import Shares
from moe_serve.engine.service.steady_clock import SteadyClock
from moe_serve.engine.service.step_model import (
    FittedSteps,
    StepModel,
    StepWork,
    prompt_token_s,
    work_s,
)
from moe_serve.engine.service.workflows import Workflows

_log = logging.getLogger(__name__)

_NOW = np.zeros(1)
_STEP_WEIGHT = 0.1  # of a new step in the usual seconds
_WEIGHT = 0.05  # of a new prompt in the usual number of tokens
_UNMEASURED_TOKEN_S = 1e-3  # before any step was measured, for the order only


@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """The seconds that work counts for shares."""

    prompt_token: float
    decode_row: float


class ServiceState:
    """Keeps the state on the engine's thread, except `admission` and `stats`."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        model: StepModel | None = None,
        lengths: AnswerLengths | None = None,
    ) -> None:
        """`model` None: steps are measured. `lengths` None: the tiers' recent answers."""
        self.config, self.clock = config, clock
        self.steady = SteadyClock(clock)
        self.model: StepModel = FittedSteps() if model is None else model
        self.shares, self.workflows, self.arrivals = Shares(), Workflows(), RecentArrivals()
        names = [tier.name for tier in config.tiers] or [""]
        self._tier_of = {name: index for index, name in enumerate(names)}
        self.tier_names = tuple(names)
        self.ledger = Ledger(names)
        self._calibrations = [ForecastCalibration() for _ in names]
        self.lengths: AnswerLengths = TierLengths(len(names)) if lengths is None else lengths
        self.ends = AnswerEnds()
        self._usual_tokens = 0.0
        self._tokens = 0.0, 0.0  # of recent prompts: all, and those that were not cached
        self.order_name = resolved_order(config)
        rule = rule_of(config, lambda: self._usual_tokens * self.token_s)
        self.order = StartOrder(rule, config.max_wait_s, config.late, bucket_of(config))
        self.admission = Admission(
            self.order, config.max_passed_over_s, config.max_wait_s, self._factors, clock
        )
        self.decisions = HistogramCounter(DECISION_BOUNDS)  # seconds of ordering those that wait
        self.num_turns = self._num_engines = 0
        self.num_strict = 0  # open requests that end when their deadlines pass
        self._rows, self._is_typical = StepWork(), True  # of a step of several engines
        self.token_s = _UNMEASURED_TOKEN_S  # to read a prompt token, as steps are now
        self.step_s = 0.0  # of a step that reads nothing
        self.more_s = 0.0  # that one more prompt token adds to a step
        self.usual_step_s = 0.0  # of recent steps
        self.work = WorkSeconds(0.0, 0.0)

    @classmethod
    def of(
        cls, config: SchedulerConfig, clock: Clock, model: StepModel | None = None
    ) -> ServiceState | None:
        """Returns the state of a server with tiers or an order by deadlines, else None."""
        check_order(config)
        if not config.tiers:
            if resolved_order(config) == "priority":
                return None
            if resolved_order(config) in BY_DEADLINE:
                _log.warning(
                    "scheduler.order is %r without scheduler.tiers: a request has a deadline of "
                    "its own only if it sends slo with a key that may tighten targets "
                    "(server.key_may_tighten); every other one is due %g s after it arrives "
                    "(scheduler.max_wait_s).",
                    config.order,
                    config.max_wait_s,
                )
        lengths = predicted_lengths() if config.length_prediction == "on" else None
        return cls(config, clock, model, lengths)

    def _factors(self, tier: str, raw_s: float) -> Factors:
        return self._calibrations[self._tier_of.get(tier, 0)].factors(raw_s)

    def next_engine(self) -> int:
        """Returns a number for one more engine."""
        self._num_engines += 1
        return self._num_engines

    def tier(self, service: Service) -> int:
        """Returns the place of a request's tier; that of the first one if it is unknown."""
        return self._tier_of.get(service.tier, 0)

    def enter(self, sequence: Sequence, num_left: int) -> Standing:
        """Gives a new sequence its standing. `num_left`: prompt tokens that are not cached."""
        request = sequence.request
        service, targets = request.service, request.service.targets
        queued_s, tier = self.steady.at(request.arrival_time), self.tier(service)
        self._usual_tokens += (_WEIGHT if self._usual_tokens else 1.0) * (
            num_left - self._usual_tokens
        )
        standing = Standing(
            queued_s=queued_s,
            deadline_s=self._deadline(sequence, tier, queued_s),
            tier=tier,
            tenant=self.shares.enter(tier, service.tenant),
            num_left=num_left,
        )
        if targets.is_strict:
            self.num_strict += 1
            if targets.ttft_s is not None:
                standing.first_due_s = queued_s + targets.ttft_s
            if targets.e2e_s is not None:
                standing.last_due_s = queued_s + targets.e2e_s
        may_refuse = targets.is_strict or service.is_sheddable
        standing.is_promised = may_refuse and targets.ttft_s is not None
        work_s = num_left * self.token_s
        slack_s = standing.deadline_s - self.steady() - work_s
        keys_at = self.order.keys_over_time(slack_s, work_s, service.weight, request.priority)
        self.arrivals.note(queued_s, float(keys_at(_NOW)[0]), num_left)
        standing.raw_s = self._accepted_s(sequence)
        whole, left = self._tokens
        keep = 1 - _WEIGHT
        self._tokens = keep * whole + sequence.num_tokens, keep * left + num_left
        sequence.standing = standing
        return standing

    def _accepted_s(self, sequence: Sequence) -> float | None:
        """Returns the forecast with which a new sequence was accepted, without correction."""
        request, num_tokens = sequence.request, sequence.num_prompt_tokens
        raw_s = self.admission.entered(self.num_turns, num_tokens)
        if raw_s is None and self.model.is_measured:
            raw_s = self.admission.raw_s(
                request.service, num_tokens, request.priority, request.arrival_time
            )
        return raw_s

    def _deadline(self, sequence: Sequence, tier: int, queued_s: float) -> float:
        """Returns the virtual deadline of the first token."""
        request = sequence.request
        service, targets = request.service, request.service.targets
        shift_s = self.config.max_passed_over_s * request.priority
        if targets.e2e_s is not None:
            whole_s = queued_s + targets.e2e_s
            if service.workflow:
                whole_s = self.workflows.due_s(
                    service.tenant, service.workflow, service.stage, targets.e2e_s, queued_s
                )
            answer_s = self.lengths.p90(sequence, tier) * self.step_s
            latest_s = whole_s - answer_s
        else:
            latest_s = math.inf
        if targets.ttft_s is not None:
            latest_s = min(latest_s, queued_s + targets.ttft_s)
        elif latest_s == math.inf:
            latest_s = queued_s + self.config.max_wait_s
        return latest_s + shift_s

    def got_token(self, sequence: Sequence, now: float) -> None:
        """Notes the first token of a request."""
        standing = sequence.standing
        assert standing is not None, f"sequence {sequence.id} was not given a standing"
        if standing.first_token_at is None:
            self.ledger.first_token(sequence, standing, now)
            if standing.raw_s is not None:
                actual_s = now - sequence.request.arrival_time
                calibration = self._calibrations[standing.tier]
                calibration.compare(standing.raw_s, actual_s)
                if standing.is_promised:
                    calibration.promise(is_kept=now <= self._due_at(sequence))

    def leave(self, sequence: Sequence) -> None:
        """Notes that a sequence has ended, in whatever way."""
        if sequence.standing is not None:
            self.shares.leave(sequence.standing.tenant)
            self.num_strict -= sequence.request.service.targets.is_strict

    def take_over(self, sequence: Sequence, source: ServiceState) -> None:
        """Takes a sequence with its standing over from engines with another state."""
        standing, service = sequence.standing, sequence.request.service
        if source is self or standing is None:
            return
        source.leave(sequence)
        shift_s = self.steady() - source.steady()
        standing.queued_s += shift_s
        standing.deadline_s += shift_s
        standing.first_due_s += shift_s
        standing.last_due_s += shift_s
        standing.tenant = self.shares.enter(standing.tier, service.tenant)
        self.num_strict += service.targets.is_strict

    def finished(self, sequence: Sequence, now: float) -> None:
        """Notes that the answer of a request is complete."""
        standing, service = sequence.standing, sequence.request.service
        assert standing is not None, f"sequence {sequence.id} was not given a standing"
        is_good = self.ledger.finished(sequence, standing, now)
        self.shares.finished(standing.tenant, is_good=is_good)
        is_cut = sequence.num_output_tokens == sequence.rules.max_tokens
        self.lengths.note(sequence, standing.tier, is_complete=not is_cut)
        self.ends.note(sequence.num_output_tokens, is_complete=not is_cut)
        if service.workflow:
            self.workflows.ended(
                service.tenant, service.workflow, service.stage, self.steady.at(now)
            )

    def expired(self, sequence: Sequence) -> None:
        """Notes that a strict request is ended, as its deadline has passed."""
        assert sequence.standing is not None, f"sequence {sequence.id} was not given a standing"
        standing = sequence.standing
        self.ledger.expired(sequence, standing)
        if standing.first_token_at is None and standing.raw_s is not None:
            waited_s = self.clock() - sequence.request.arrival_time
            calibration = self._calibrations[standing.tier]
            calibration.compare_at_least(standing.raw_s, waited_s)
            if standing.is_promised:
                calibration.promise(is_kept=False)

    @staticmethod
    def _due_at(sequence: Sequence) -> float:
        """Returns when the first token is due, on the engine's clock."""
        target_s = sequence.request.service.targets.ttft_s
        return math.inf if target_s is None else sequence.request.arrival_time + target_s

    @property
    def uncached(self) -> float:
        """The share of the recent prompts' tokens that were not in the cache."""
        whole, left = self._tokens
        return left / whole if whole else 1.0

    @property
    def num_live_engines(self) -> int:
        return self.admission.num_snapshots

    def add_rows(self, rows: StepWork, *, is_typical: bool) -> None:
        """Adds one engine's part of a step of all engines. `is_typical`: it ran as it was begun."""
        self._rows += rows
        self._is_typical &= is_typical

    def take_rows(self) -> StepWork | None:
        """Returns the rows of the step that has ended on all engines; None if its time says
        nothing."""
        rows, self._rows = self._rows, StepWork()
        is_typical, self._is_typical = self._is_typical, True
        return rows if is_typical and rows != StepWork() else None

    def turn(self, *, has_work: bool) -> None:
        """Notes the end of a step, or of a step of all engines."""
        self.num_turns += 1
        if has_work:
            self.steady.turn()
        else:
            self.steady.rest()

    def observe(self, rows: StepWork, seconds: float) -> None:
        """Learns from a step that ran: of one engine, or of all that step together."""
        self.model.observe(rows, seconds)
        self.usual_step_s += (_STEP_WEIGHT if self.usual_step_s else 1.0) * (
            seconds - self.usual_step_s
        )
        self.refresh(rows)

    def refresh(self, rows: StepWork) -> None:
        """Derives the inputs of the order and the forecast from the model."""
        most, seats = self.config.max_batched_tokens, self.config.max_num_seqs
        if self.model.is_measured:
            num_decoding, num_context = rows.num_decoding, rows.num_context
            num_prompt = max(1, most - num_decoding)
            self.token_s = prompt_token_s(self.model, num_decoding, num_prompt, num_context)
            self.step_s = self.model.seconds(StepWork(max(1, num_decoding), 0, num_context))
            self.more_s = max(0.0, self.token_s - self.step_s / num_prompt)
            self.work = WorkSeconds(*work_s(self.model, (most, seats)))

    @property
    def delta_s(self) -> float:
        """Seconds of work by which a tenant may be ahead of another one of its tier."""
        if not self.model.is_measured:
            return math.inf
        most, seats = self.config.max_batched_tokens, self.config.max_num_seqs
        chunk_s = self.work.prompt_token * most
        return 2 * max(chunk_s, self.work.decode_row * seats) + chunk_s

    def stats(self) -> ServiceStats:
        """Returns a snapshot. Safe from any thread."""
        refused = [self.admission.num_refused(name) for name in self.tier_names]
        return ServiceStats(
            order=self.order_name,
            tiers=self.ledger.snapshot(refused),
            tenants=self.shares.top(self.tier_names),
            num_tenants=self.shares.num_remembered,
            jain_index=self.shares.jain_index,
            forecast=error_of(self._calibrations),
            decisions=self.decisions.snapshot(),
        )
