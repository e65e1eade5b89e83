"""Holds the state that all cells of a server share to keep the targets of service tiers: shares of
tenants, the rule of order, forecasts, promises and counts.

Cells have a `ServiceState` each, with measured times of their own. A tenant has one counter of
work, whatever cells do it.
"""

from __future__ import annotations

import logging
import math

from moe_serve.cache.histogram import HistogramCounter
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_stats import DECISION_BOUNDS, ServiceStats
from moe_serve.engine.request.service_terms import Service
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.arrivals import RecentArrivals
from moe_serve.engine.service.forecast_calibration import Factors, ForecastCalibration, error_of
from moe_serve.engine.service.ledger import Ledger
from moe_serve.engine.service.lengths.answer_lengths import (
    AnswerEnds,
    AnswerLengths,
    OutputLimits,
    TierLengths,
)
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
from moe_serve.engine.service.workflows import Workflows

_log = logging.getLogger(__name__)

UNMEASURED_TOKEN_S = 1e-3  # to read a prompt token, before any step was measured: for the order
_WEIGHT = 0.05  # of a new prompt in the usual number of tokens


class ServicePolicy:
    """Keeps its state on the engine's thread, except `admission` and `stats`."""

    def __init__(
        self, config: SchedulerConfig, clock: Clock, lengths: AnswerLengths | None = None
    ) -> None:
        """With `lengths` None the recent answers of the tiers are used."""
        self.config, self.clock = config, clock
        self.shares, self.workflows, self.arrivals = Shares(), Workflows(), RecentArrivals()
        names = [tier.name for tier in config.tiers] or [""]
        self._tier_of = {name: index for index, name in enumerate(names)}
        self.tier_names = tuple(names)
        self.ledger = Ledger(names)
        self._calibrations = [ForecastCalibration() for _ in names]
        self.lengths: AnswerLengths = TierLengths(len(names)) if lengths is None else lengths
        self.ends = AnswerEnds()
        self.limits = OutputLimits(config.tiers)
        self._usual_tokens = 0.0
        self._tokens = 0.0, 0.0  # of recent prompts: all, and those that were not cached
        self._token_s: dict[int, float] = {}  # to read a prompt token, by the measured cells
        self.order_name = resolved_order(config)
        rule = rule_of(config, self._usual_work_s)
        self.order = StartOrder(rule, config.max_wait_s, config.late, bucket_of(config))
        self.admission = Admission(
            self.order, config.max_passed_over_s, config.max_wait_s, self._factors, clock
        )
        self.decisions = HistogramCounter(DECISION_BOUNDS)  # seconds of ordering those that wait
        self.num_turns = self._num_engines = self._num_cells = 0
        self.num_strict = 0  # open requests that end when their deadlines pass

    @classmethod
    def of(cls, config: SchedulerConfig, clock: Clock) -> ServicePolicy | None:
        """Returns the policy of a server with tiers or an order by deadlines, else None."""
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
        return cls(config, clock, predicted_lengths() if config.length_prediction == "on" else None)

    def _factors(self, tier: str, raw_s: float) -> Factors:
        return self._calibrations[self._tier_of.get(tier, 0)].factors(raw_s)

    def _usual_work_s(self) -> float:
        """Returns the usual time to read a prompt, as the mean over the cells."""
        each = [*self._token_s.values()] or [UNMEASURED_TOKEN_S]  # any thread may change it
        return self._usual_tokens * sum(each) / len(each)

    def next_engine(self) -> int:
        """Returns a number for one more engine."""
        self._num_engines += 1
        return self._num_engines

    def next_cell(self) -> int:
        """Returns a number for one more cell."""
        self._num_cells += 1
        return self._num_cells

    def set_token_s(self, cell: int, seconds: float) -> None:
        """Notes the seconds in which a cell reads a prompt token."""
        self._token_s[cell] = seconds

    def remove_cell(self, cell: int) -> None:
        """Forgets a cell that has closed, and its snapshots for forecasts."""
        self._token_s.pop(cell, None)
        self.admission.remove_cell(cell)

    def tier(self, service: Service) -> int:
        """Returns the place of a request's tier; that of the first one if it is unknown."""
        return self._tier_of.get(service.tier, 0)

    def note_prompt(self, num_tokens: int, num_left: int) -> None:
        """Learns from a new prompt. `num_left`: its tokens that are not cached."""
        weight = _WEIGHT if self._usual_tokens else 1.0
        self._usual_tokens += weight * (num_left - self._usual_tokens)
        whole, left = self._tokens
        keep = 1 - _WEIGHT
        self._tokens = keep * whole + num_tokens, keep * left + num_left

    @property
    def uncached(self) -> float:
        """The share of the recent prompts' tokens that were not in the cache."""
        whole, left = self._tokens
        return left / whole if whole else 1.0

    def got_token(self, sequence: Sequence, now: float) -> None:
        """Notes the first token of a request."""
        standing = _standing_of(sequence)
        if standing.first_token_at is None:
            self.ledger.first_token(sequence, standing, now)
            if standing.raw_s is not None:
                actual_s = now - sequence.request.arrival_time
                calibration = self._calibrations[standing.tier]
                calibration.compare(standing.raw_s, actual_s)
                if standing.is_promised:
                    calibration.promise(is_kept=now <= _due_at(sequence))

    def leave(self, sequence: Sequence) -> None:
        """Notes that a sequence has ended, for any reason."""
        if sequence.standing is not None:
            self.shares.leave(sequence.standing.tenant)
            self.num_strict -= sequence.request.service.targets.is_strict

    def finished(self, sequence: Sequence, now: float) -> None:
        """Notes that the answer of a request is complete."""
        standing, service = _standing_of(sequence), sequence.request.service
        is_good = self.ledger.finished(sequence, standing, now)
        self.shares.finished(standing.tenant, is_good=is_good)
        is_cut = sequence.num_output_tokens == sequence.rules.max_tokens
        self.lengths.note(sequence, standing.tier, is_complete=not is_cut)
        self.ends.note(sequence.num_output_tokens, is_complete=not is_cut)
        self._note_for_limit(sequence, standing.tier, is_cut=is_cut)
        if service.workflow:
            self.workflows.ended(service.tenant, service.workflow, service.stage, now)

    def _note_for_limit(self, sequence: Sequence, tier: int, *, is_cut: bool) -> None:
        """Passes an answer's length to the limits of runaways. The length of an answer with
        `ignore_eos` is not used, because its client chose it, unless the limit itself ended the
        answer.
        """
        request, length = sequence.request, sequence.num_output_tokens
        is_wanted = request.params.ignore_eos and length == request.rules.max_tokens
        self.limits.note(tier, length, is_complete=is_wanted or not is_cut)

    def expired(self, sequence: Sequence) -> None:
        """Notes that a strict request is ended, as its deadline has passed."""
        standing = _standing_of(sequence)
        self.ledger.expired(sequence, standing)
        if standing.first_token_at is None and standing.raw_s is not None:
            waited_s = self.clock() - sequence.request.arrival_time
            calibration = self._calibrations[standing.tier]
            calibration.compare_at_least(standing.raw_s, waited_s)
            if standing.is_promised:
                calibration.promise(is_kept=False)

    def stats(self) -> ServiceStats:
        """Returns a snapshot. Safe from any thread."""
        refused = [self.admission.num_refused(name) for name in self.tier_names]
        return ServiceStats(
            order=self.order_name,
            tiers=self.ledger.snapshot(refused),
            output_limits=self.limits.snapshot(),
            tenants=self.shares.top(self.tier_names),
            num_tenants=self.shares.num_remembered,
            jain_index=self.shares.jain_index,
            forecast=error_of(self._calibrations),
            decisions=self.decisions.snapshot(),
        )


def _standing_of(sequence: Sequence) -> Standing:
    assert sequence.standing is not None, f"sequence {sequence.id} was not given a standing"
    return sequence.standing


def _due_at(sequence: Sequence) -> float:
    """Returns when the first token is due, on the engine's clock."""
    target_s = sequence.request.service.targets.ttft_s
    return math.inf if target_s is None else sequence.request.arrival_time + target_s
