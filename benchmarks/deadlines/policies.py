"""The policies that are compared, as settings of the server's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from deadlines.setting import BUDGET, SEATS, TARGETS, Setting
from moe_serve.config.sections import LateName, OrderName, SchedulerConfig, StepBudgetName

PATIENCE, MAX_WAIT = 8.0, 1.5  # times the target of the top and of the slackest tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An order of the queue, what becomes of late requests, and whether requests are refused.
    `patience` and `max_wait` are times the TTFT target of the top and of the slackest tier."""

    name: str
    order: OrderName
    late: LateName = "keep"
    is_strict: bool = False
    has_tpot: bool = False
    step_budget: StepBudgetName = "fixed"
    budget: int = BUDGET
    patience: float = PATIENCE
    max_wait: float = MAX_WAIT

    @property
    def has_priorities(self) -> bool:
        return self.order == "priority"

    def max_wait_s(self, setting: Setting) -> float:
        return self.max_wait * TARGETS["flex"] * setting.unloaded_s

    def scheduler(self, setting: Setting) -> SchedulerConfig:
        """Returns the settings. A level of priority is worth as many targets of the top tier as
        the default, 5 s, is of a target of 1 s."""
        mix = setting.tiers(has_tpot=self.has_tpot)
        return SchedulerConfig(
            max_num_seqs=SEATS,
            max_batched_tokens=self.budget,
            max_queued_requests=2**20,
            max_passed_over_s=0.0 if self.order == "fifo" else 5.0 * setting.target_s,
            tiers=mix.tiers,
            order=self.order,
            patience_s=self.patience * setting.target_s,
            max_wait_s=self.max_wait_s(setting),
            late=self.late,
            step_budget=self.step_budget,
        )


FIFO = Policy(name="fifo", order="fifo")
ATC = Policy(name="atc", order="atc")
REFUSING = Policy(name="atc+refuse", order="atc", is_strict=True)
POLICIES = (
    FIFO,
    Policy(name="priority", order="priority"),
    Policy(name="edf", order="edf"),
    Policy(name="edf+demote", order="edf", late="demote"),
    ATC,
    Policy(name="atc+demote", order="atc", late="demote"),
    Policy(name="fifo+refuse", order="fifo", is_strict=True),
    REFUSING,
)
