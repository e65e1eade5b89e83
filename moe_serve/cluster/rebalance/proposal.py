"""Decides if a plan is worth a move."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np

from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from moe_serve.cluster.rebalance.load_window import STRIDE, WindowCounts
from moe_serve.cluster.rebalance.planner import Plan, PlanJob, placement_of, problem_of
from moe_serve.cluster.rebalance.rounds import changed_layers
from moe_serve.config.sections import RebalanceObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The balance of a placement over all layers and scenarios of a problem. The copies of an
    expert carry equal parts."""

    balancedness: (
        float  # mean over scenarios and layers of the ranks' mean / max load: 1 is perfect
    )
    busiest: float  # mean over scenarios and layers of the busiest rank's load

    def gain_to(self, other: Forecast) -> float:
        """Returns the share of the busiest rank's work that `other` saves."""
        return 1.0 - other.busiest / self.busiest


def forecast(problem: PlacementProblem, placement: Placement) -> Forecast:
    """Forecasts by the quantity that the problem balances: rows, or activated experts."""
    loads_SLR = device_loads(problem, copies_of(placement, problem.loads.layers))
    most_SL = loads_SLR.max(axis=2)
    balancedness_SL = loads_SLR.mean(axis=2) / most_SL
    return Forecast(balancedness=float(balancedness_SL.mean()), busiest=float(most_SL.mean()))


Refusal = Literal["window", "gain", "nothing", "away", "planner"]

CHOICES_PER_EXPERT = 32  # least average count of a window: fewer are noise
_MOST_WINDOWS = 4  # scenarios of a plan
# From this many rows of an activated expert on, multiplying them takes longer than loading its
# weights; `replica_choice: auto` uses the same number.
_MANY_ROWS = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan and its forecast; `target` None: it was refused."""

    target: Placement | None
    refusal: Refusal | None
    text: str  # the reason, with the numbers
    before: Forecast | None = None
    predicted: Forecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The layers and ranks to plan for, the most that a plan may move, and the least it must
    gain."""

    layers: tuple[int, ...]  # with routed experts
    top_k: int
    num_attention_ranks: int  # whose rows expert ranks multiply together
    slots: Sequence[int]  # of each expert rank in a layer
    max_moves: int  # most copies of a layer that may move
    min_gain: float  # least share of the busiest rank's work to save
    objective: RebalanceObjective


class Proposer:
    """Keeps the last windows. One thread calls `propose`; any may call `judge`."""

    def __init__(self, limits: PlanLimits, plan: Plan) -> None:
        self._limits, self._plan = limits, plan
        self._windows: deque[tuple[str, WindowCounts]] = deque(maxlen=_MOST_WINDOWS)
        self._numbers = count(1)

    def propose(
        self, window: WindowCounts, current: Placement, *, is_asked: bool = False
    ) -> Proposal:
        """Plans from this window and those before it. If `is_asked`, a window with few counts is
        left out."""
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
        """Returns True if the window has counts enough to plan, or to judge a placement."""
        return window.num_tokens >= self._least_tokens(placement)

    def _least_tokens(self, placement: Placement) -> int:
        return -(-CHOICES_PER_EXPERT * placement.num_experts // self._limits.top_k)

    def given(self, window: WindowCounts, current: Placement, target: Placement) -> Proposal:
        """Return a proposal of a placement that an operator gives, whatever its gain.

        Raises PlacementError unless it is one for this model and these ranks, within their slots.
        """
        limits = self._limits
        target.check_fits(limits.layers, current.num_experts, current.num_ranks)
        check_slots(target, limits.slots)
        before, predicted = self.judge(window, current), self.judge(window, target)
        text = f"a given plan that changes {len(changed_layers(current, target))} layers"
        if before is not None and predicted is not None:
            text += f", balancedness {before.balancedness:.3f} -> {predicted.balancedness:.3f}"
        return Proposal(target=target, refusal=None, text=text, before=before, predicted=predicted)

    def judge(self, window: WindowCounts, placement: Placement) -> Forecast | None:
        """Forecasts a placement by the window's counts; None: there are too few."""
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
        """Returns the rows of a step if activated experts are balanced; None: rows are."""
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
        check_slots(target, job.slots)
        return target


def check_slots(target: Placement, slots: Sequence[int]) -> None:
    """Raise PlacementError if a rank holds more experts of a layer than it has slots."""
    for rank, most in enumerate(slots):
        layer, held = max(target.held_by(rank).items(), key=lambda item: len(item[1]))
        if len(held) > most:
            raise PlacementError(
                f"The plan gives rank {rank} {len(held)} experts of layer {layer}; it has {most} "
                "slots (cluster.rebalance_spare_slots adds some at the start)."
            )
