"""Counts the experts that the routers chose lately, and decides whether another plan is worth a
move.

The counts come from a sample of the steps. N tokens of a sequence, L layers with routed experts, K
choices, E experts.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import device_loads
from experts.placement.judge.copies import copies_of
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from moe_serve.cluster.rebalance.planner import Plan, PlanJob, placement_of, problem_of
from moe_serve.cluster.rebalance.rounds import changed_layers
from moe_serve.config.sections import RebalanceObjective
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord

STRIDE = 8  # one in STRIDE of a rank's steps is counted
_MOST_ROWS = 128  # rows counted of a step, which stand for all of its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """Counts from one `close` to the next."""

    counts_LE: NDArray[np.float64]
    num_tokens: int  # tokens counted
    sum_log_rows: float = 0.0  # sum over the steps counted
    num_steps: int = 0

    @property
    def rows_per_step(self) -> float:
        """Returns the geometric mean of an attention rank's rows: a few long prompts should not
        outweigh many decode steps."""
        return math.exp(self.sum_log_rows / max(1, self.num_steps))


class LoadWindow:
    """Implements RouteListener; one for all engines of a server. Any thread may look and close."""

    has_weights = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self._offsets_L1 = np.arange(num_layers)[:, None] * num_experts
        self._rng = np.random.default_rng(0)  # chooses the rows that stand for others
        self._lock = threading.Lock()
        self._counts = self._none()
        self._asked: set[int] = set()  # sequences whose choices are still to come

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """See `RouteListener.wants`."""
        if step % STRIDE:
            return ()
        self._asked.update(sequences)
        return sequences.keys()

    def take(self, records: list[RouteRecord]) -> None:
        """See `RouteListener.take`. Records that only other listeners asked for are left out: they
        would count some requests more than others."""
        own = [record for record in records if record.sequence_id in self._asked]
        if not own:
            return
        self._asked.difference_update(record.sequence_id for record in own)
        ids_NLK = np.concatenate([record.expert_ids_NLK for record in own])
        num_rows, weight = len(ids_NLK), 1.0
        if num_rows > _MOST_ROWS:
            weight = num_rows / _MOST_ROWS
            ids_NLK = ids_NLK[self._rng.integers(num_rows, size=_MOST_ROWS)]
        flat = (ids_NLK + self._offsets_L1).ravel()
        counts = np.bincount(flat, minlength=self._shape[0] * self._shape[1])
        with self._lock:
            before = self._counts
            self._counts = WindowCounts(
                counts_LE=before.counts_LE + weight * counts.reshape(self._shape),
                num_tokens=before.num_tokens + len(ids_NLK),
                sum_log_rows=before.sum_log_rows + math.log(num_rows),
                num_steps=before.num_steps + 1,
            )

    def look(self) -> WindowCounts:
        """Returns the counts since the last `close`."""
        return self._counts

    def close(self) -> WindowCounts:
        """Returns the counts since the last `close`, and begins a new window."""
        with self._lock:
            closed, self._counts = self._counts, self._none()
        self._asked = set()  # sequences that had ended would stay for ever
        return closed

    def _none(self) -> WindowCounts:
        return WindowCounts(counts_LE=np.zeros(self._shape), num_tokens=0)


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
    """A plan and its forecast. `target` is None if the plan was refused."""

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
    slots: tuple[int, ...]  # of each expert rank in a layer
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
                f"{window.num_tokens} tokens were counted, in one of {STRIDE} steps; at "
                f"least {self._least_tokens(current)} are needed"
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
        """Returns True if the window has enough counts to plan or to judge a placement."""
        return window.num_tokens >= self._least_tokens(placement)

    def _least_tokens(self, placement: Placement) -> int:
        return -(-CHOICES_PER_EXPERT * placement.num_experts // self._limits.top_k)

    def given(self, window: WindowCounts, current: Placement, target: Placement) -> Proposal:
        """Returns a proposal of a placement that an operator gives, regardless of its gain.

        Raises PlacementError unless the placement fits this model, these ranks and their slots.
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
        """Forecasts a placement by the window's counts; None if there are too few."""
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
            refusal, text = "gain", f"{text}; at least {100 * asked:g}% are required"
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
        """Returns the rows of a step if activated experts are balanced; None if rows are
        balanced.
        """
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
            raise PlacementError(f"The plan leaves {len(target.lost)} experts without a rank.")
        check_slots(target, job.slots)
        return target


def check_slots(target: Placement, slots: tuple[int, ...]) -> None:
    """Raises PlacementError if a rank holds more experts of a layer than it has slots."""
    for rank, most in enumerate(slots):
        layer, held = max(target.held_by(rank).items(), key=lambda item: len(item[1]))
        if len(held) > most:
            raise PlacementError(
                f"The plan gives rank {rank} {len(held)} experts of layer {layer}, but the "
                f"rank has {most} slots (set cluster.rebalance_spare_slots at the start of "
                "the server to have more)."
            )
