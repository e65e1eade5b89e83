"""A plan that is worth a move, or why there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np

from experts.placement.errors import PlacementError
from experts.placement.problem.placement import Placement
from moe_serve.cluster.rebalance.forecast import Forecast, forecast
from moe_serve.cluster.rebalance.load_window import STRIDE, WindowCounts
from moe_serve.cluster.rebalance.plan_job import PlanJob, placement_of, problem_of
from moe_serve.cluster.rebalance.planner import Plan
from moe_serve.cluster.rebalance.rounds import changed_layers
from moe_serve.config.sections import RebalanceObjective

Refusal = Literal["window", "gain", "nothing", "away", "planner"]

CHOICES_PER_EXPERT = 32  # that a window counted at least, on the average: fewer are noise
_MOST_WINDOWS = 4  # scenarios of a plan
# Rows of an activated expert from which multiplying them takes longer than loading its weights: as
# `replica_choice: auto` has it.
_MANY_ROWS = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """`target` None: refused."""

    target: Placement | None
    refusal: Refusal | None
    text: str  # with the numbers
    before: Forecast | None = None
    predicted: Forecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What plans are for: the model, its ranks, and what a plan may do and must bring."""

    layers: tuple[int, ...]  # with routed experts
    top_k: int
    num_attention_ranks: int  # whose rows expert ranks multiply together
    slots: Sequence[int]  # of each expert rank, in a layer
    max_moves: int  # copies that a layer may get elsewhere
    min_gain: float  # of the busiest rank's work
    objective: RebalanceObjective


class Proposer:
    """Keeps the last windows. `propose` is for one thread; `judge` for any."""

    def __init__(self, limits: PlanLimits, plan: Plan) -> None:
        self._limits, self._plan = limits, plan
        self._windows: deque[tuple[str, WindowCounts]] = deque(maxlen=_MOST_WINDOWS)
        self._numbers = count(1)

    def propose(
        self, window: WindowCounts, current: Placement, *, is_asked: bool = False
    ) -> Proposal:
        """From this window and those before it; from these alone if somebody asks for a plan while
        little is chosen."""
        if self.is_enough(window, current):
            self._windows.append((f"window {next(self._numbers)}", window))
        elif not (is_asked and self._windows):
            text = (
                f"{window.num_tokens} tokens were counted, in one step of {STRIDE}; "
                f"{self._least_tokens(current)} are needed"
            )
            return Proposal(target=None, refusal="window", text=text)
        job = self._job(dict(self._windows), current)
        try:
            problem = problem_of(job)
            before = forecast(problem, current)
            target = self._target(job)
        except PlacementError as error:
            return Proposal(target=None, refusal="planner", text=str(error))
        return self._weighed(current, target, before, forecast(problem, target), job)

    def is_enough(self, window: WindowCounts, placement: Placement) -> bool:
        """Whether a plan may be made of it, and a placement judged by it."""
        return window.num_tokens >= self._least_tokens(placement)

    def _least_tokens(self, placement: Placement) -> int:
        return -(-CHOICES_PER_EXPERT * placement.num_experts // self._limits.top_k)

    def judge(self, window: WindowCounts, placement: Placement) -> Forecast | None:
        """How well a placement does by what was counted; None: too little was."""
        if not self.is_enough(window, placement):
            return None
        return forecast(problem_of(self._job({"now": window}, placement)), placement)

    def _weighed(
        self,
        current: Placement,
        target: Placement,
        before: Forecast,
        predicted: Forecast,
        job: PlanJob,
    ) -> Proposal:
        gain, asked = before.gain_to(predicted), self._limits.min_gain
        what = "rows" if job.batch_size is None else f"experts activated by {job.batch_size} rows"
        text = (
            f"balancedness {before.balancedness:.3f} -> {predicted.balancedness:.3f} predicted, "
            f"{100 * gain:.1f}% less for the busiest rank ({what})"
        )
        refusal: Refusal | None = None
        if not changed_layers(current, target):
            refusal, text = "nothing", f"no better plan was found than the one in force: {text}"
        elif gain < asked:
            refusal, text = "gain", f"{text}; {100 * asked:g}% are asked for"
        return Proposal(
            target=target if refusal is None else None,
            refusal=refusal,
            text=text,
            before=before,
            predicted=predicted,
        )

    def _job(self, windows: dict[str, WindowCounts], current: Placement) -> PlanJob:
        limits, counts = self._limits, [window.counts_LE for window in windows.values()]
        return PlanJob(
            counts=np.stack(counts).astype("<f8").tobytes(),
            layers=limits.layers,
            scenarios=tuple(windows),
            num_experts=current.num_experts,
            ranks_of=[current.ranks_of[layer] for layer in limits.layers],
            slots=limits.slots,
            max_moves=limits.max_moves,
            top_k=limits.top_k,
            batch_size=self._batch_size(list(windows.values())[-1], current.num_experts),
        )

    def _batch_size(self, window: WindowCounts, num_experts: int) -> int | None:
        """Rows of a step if activated experts are what counts; None: rows themselves do."""
        limits = self._limits
        rows = max(1, round(window.rows_per_step * limits.num_attention_ranks))
        is_many = rows * limits.top_k >= _MANY_ROWS * num_experts
        if limits.objective == "tokens" or (limits.objective == "auto" and is_many):
            return None
        return rows

    def _target(self, job: PlanJob) -> Placement:
        found = self._plan(job)
        if found.why is not None:
            raise PlacementError(found.why)
        target = placement_of(job, found.ranks_of)
        if target.lost:
            raise PlacementError(f"The plan has {len(target.lost)} experts on no rank.")
        for rank, slots in enumerate(job.slots):
            most = max(map(len, target.held_by(rank).values()))
            if most > slots:
                raise PlacementError(
                    f"The plan gives rank {rank} {most} experts of a layer; it has {slots} slots."
                )
        return target
