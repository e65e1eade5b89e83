"""Holds the state that the engines of a cell share: measured times, the clock of lateness, and the
policy, which all cells of the server share.

The attention ranks of a cell have an engine each. They run in lockstep, so the time of a step
depends on the rows of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.service_policy import UNMEASURED_TOKEN_S, ServicePolicy
from moe_serve.engine.service.steady_clock import SteadyClock
from moe_serve.engine.service.step_model import (
    FittedSteps,
    StepModel,
    StepWork,
    prompt_token_s,
    work_s,
)

_NOW = np.zeros(1)
_STEP_WEIGHT = 0.1  # of a new step in the usual seconds


@dataclass(frozen=True, slots=True)
class WorkSeconds:
    """The seconds that work counts for shares."""

    prompt_token: float
    decode_row: float


class ServiceState:
    """Keeps the state on the engine's thread. `number` is that of the cell in its policy."""

    def __init__(self, policy: ServicePolicy, model: StepModel | None = None) -> None:
        """`model` None: steps are measured."""
        self.policy, self.config, self.clock = policy, policy.config, policy.clock
        self.shares, self.ledger, self.lengths = policy.shares, policy.ledger, policy.lengths
        self.order, self.order_name = policy.order, policy.order_name
        self.admission, self.decisions = policy.admission, policy.decisions
        self.number = policy.next_cell()
        self.steady = SteadyClock(self.clock)
        self.model: StepModel = FittedSteps() if model is None else model
        self._rows, self._is_typical = StepWork(), True  # of a step of several engines
        self.token_s = UNMEASURED_TOKEN_S  # to read a prompt token, as steps are now
        self.step_s = 0.0  # of a step that reads nothing
        self.more_s = 0.0  # that one more prompt token adds to a step
        self.usual_step_s = 0.0  # of recent steps
        self.work = WorkSeconds(0.0, 0.0)

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        clock: Clock,
        model: StepModel | None = None,
        policy: ServicePolicy | None = None,
    ) -> ServiceState | None:
        """Returns the state of a server with tiers or an order by deadlines, else None. `policy`:
        of the server's cells; None: this is the only cell."""
        policy = ServicePolicy.of(config, clock) if policy is None else policy
        return None if policy is None else cls(policy, model)

    def enter(self, sequence: Sequence, num_left: int) -> Standing:
        """Gives a new sequence its standing. `num_left`: prompt tokens that are not cached."""
        request, policy = sequence.request, self.policy
        service, targets = request.service, request.service.targets
        queued_s, tier = self.steady.at(request.arrival_time), policy.tier(service)
        standing = Standing(
            queued_s=queued_s,
            deadline_s=self._deadline(sequence, tier, queued_s),
            clock=self.steady,
            tier=tier,
            tenant=self.shares.enter(tier, service.tenant),
            num_left=num_left,
        )
        if targets.is_strict:
            policy.num_strict += 1
            if targets.ttft_s is not None:
                standing.first_due_s = queued_s + targets.ttft_s
            if targets.e2e_s is not None:
                standing.last_due_s = queued_s + targets.e2e_s
        may_refuse = targets.is_strict or service.is_sheddable
        self._limit_output(sequence, standing)
        standing.is_promised = may_refuse and targets.ttft_s is not None
        policy.note_prompt(sequence.num_tokens, num_left)
        work_s = num_left * self.token_s
        slack_s = standing.deadline_s - self.steady() - work_s
        keys_at = self.order.keys_over_time(slack_s, work_s, service.weight, request.priority)
        policy.arrivals.note(request.arrival_time, float(keys_at(_NOW)[0]), num_left)
        standing.raw_s = self._accepted_s(sequence)
        sequence.standing = standing
        return standing

    def _limit_output(self, sequence: Sequence, standing: Standing) -> None:
        """Gives a new sequence the predicted limit of its tier, if the client's own is not lower. A
        tier that ends runaways makes it the limit of the answer."""
        limit, most = self.policy.limits.of(standing.tier), sequence.rules.max_tokens
        limit = max(limit, float(sequence.request.params.min_tokens))
        if limit >= (math.inf if most is None else most):
            return
        standing.output_limit = limit
        if self.config.tiers[standing.tier].runaways == "end":
            sequence.rules = replace(sequence.rules, max_tokens=int(limit))

    def _accepted_s(self, sequence: Sequence) -> float | None:
        """Returns the forecast with which a new sequence was accepted, without correction."""
        request, num_tokens = sequence.request, sequence.num_prompt_tokens
        raw_s = self.admission.entered(self.policy.num_turns, num_tokens, self.number)
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
            whole_s = targets.e2e_s
            if service.workflow:
                arrived_at = request.arrival_time  # workflows go through cells with other clocks
                whole_s = self.policy.workflows.due_s(
                    service.tenant, service.workflow, service.stage, targets.e2e_s, arrived_at
                )
                whole_s -= arrived_at
            answer_s = self.lengths.p90(sequence, tier) * self.step_s
            latest_s = queued_s + whole_s - answer_s
        else:
            latest_s = math.inf
        if targets.ttft_s is not None:
            latest_s = min(latest_s, queued_s + targets.ttft_s)
        elif latest_s == math.inf:
            latest_s = queued_s + self.config.max_wait_s
        return latest_s + shift_s

    def take_over(self, sequence: Sequence) -> None:
        """Converts the standing of a sequence that comes from another cell to this cell's clock."""
        standing = sequence.standing
        if standing is None or standing.clock is self.steady:
            return
        shift_s = self.steady() - standing.clock()
        standing.clock = self.steady
        standing.queued_s += shift_s
        standing.deadline_s += shift_s
        standing.first_due_s += shift_s
        standing.last_due_s += shift_s

    def add_rows(self, rows: StepWork, *, is_typical: bool) -> None:
        """Adds one engine's part of a step of all engines. `is_typical`: it ran as it was begun."""
        self._rows += rows
        self._is_typical &= is_typical

    def take_rows(self) -> StepWork | None:
        """Returns the rows of the step that has ended on all engines; None if its time is not
        representative.
        """
        rows, self._rows = self._rows, StepWork()
        is_typical, self._is_typical = self._is_typical, True
        return rows if is_typical and rows != StepWork() else None

    def turn(self, *, has_work: bool) -> None:
        """Notes the end of a step, or of a step of all engines."""
        self.policy.num_turns += 1
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
            self.policy.set_token_s(self.number, self.token_s)

    @property
    def delta_s(self) -> float:
        """The seconds of work by which a tenant may be ahead of another one of its tier."""
        if not self.model.is_measured:
            return math.inf
        most, seats = self.config.max_batched_tokens, self.config.max_num_seqs
        chunk_s = self.work.prompt_token * most
        return 2 * max(chunk_s, self.work.decode_row * seats) + chunk_s
