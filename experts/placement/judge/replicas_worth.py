"""Judges whether replicas are worth their memory: plans the same problem with fewer and more of
them, and computes how many a target balance takes at least.

S scenarios, L layers, D devices; H replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.balance import objective_of
from experts.placement.judge.bound import FewestPeaks
from experts.placement.judge.copies import CopyLoad
from experts.placement.judge.steps import StepBalance
from experts.placement.placement_error import PlacementError
from experts.placement.problem.problem import PlacementProblem

_WORTH, _OF_MEMORY = 0.01, 0.1  # the largest load falls by 1%, and by a tenth of the memory
_AS_GOOD = 1.005  # of the objective: fewer replicas that come this near would do

Ints = NDArray[np.int64]
Plan = Callable[[PlacementProblem], Ints]
Step = Callable[[Ints], StepBalance | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTrial:
    """A plan with one number of slots. Slots may stay empty: the replicas are those of the plan."""

    num_slots: int  # of a device
    num_replicas: int  # in the layer that has most
    is_even: bool  # all layers have the same number
    objective: float
    step: float | None  # balancedness of single steps
    more_memory: float  # share of memory more than without replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaVerdict:
    """The trials in ascending order of slots; one of them is the plan."""

    trials: list[ReplicaTrial]
    sentence: str


def judge_replicas(
    problem: PlacementProblem, copies_LED: Ints, plan: Plan, step: Step
) -> ReplicaVerdict | None:
    """Judges the replicas; None if the devices differ, as it is not defined which device would get
    fewer slots."""
    slots = {device.num_slots for device in problem.devices.devices}
    if len(slots) != 1:
        return None
    num_devices, num_experts = len(problem.devices), problem.loads.num_experts
    (now,) = slots
    least = -(-num_experts // num_devices)
    wanted = sorted({least, *(now - less for less in (1, 2, 4, 8) if now - less > least), now})
    if now == least and now < num_experts:
        wanted.append(now + 1)
    trials = []
    for per_device in wanted:
        found = copies_LED if per_device == now else _other(problem, per_device, plan)
        if found is not None:
            copies_L, steps = found.sum(axis=(1, 2)), step(found)
            trials.append(
                ReplicaTrial(
                    num_slots=per_device,
                    num_replicas=int(copies_L.max()) - num_experts,
                    is_even=bool(copies_L.min() == copies_L.max()),
                    objective=objective_of(problem, found),
                    step=None if steps is None else steps.even,
                    more_memory=float(copies_L.mean()) / num_experts - 1.0,
                )
            )
    return ReplicaVerdict(trials=trials, sentence=_sentence(trials, now))


def _other(problem: PlacementProblem, per_device: int, plan: Plan) -> Ints | None:
    """Plans with another number of slots; None if no such plan exists."""
    devices = tuple(
        replace(device, num_slots=per_device, memory_bytes=None)
        for device in problem.devices.devices
    )
    try:
        other = replace(
            problem,
            devices=replace(problem.devices, devices=devices),
            move=None,
        )
        return plan(other)
    except PlacementError:
        return None


def _sentence(trials: list[ReplicaTrial], now: int) -> str:
    """Returns a sentence about the largest load of a device, which a layer waits for. `now` is the
    number of slots in the plan."""
    first, plan = trials[0], next(t for t in trials if t.num_slots == now)
    num_replicas = plan.num_replicas
    if plan is first:
        if len(trials) == 1:
            return "Other numbers of replicas were not tried."
        more = trials[-1]
        gain, added = 1.0 - more.objective / plan.objective, more.more_memory - plan.more_memory
        worth = "worth" if _pays(gain, added) else "not worth"
        some = (
            f"{num_replicas} replica{'s' * (num_replicas != 1)}" if num_replicas else "No replicas"
        )
        return (
            f"{some}: {_count(more)} in each layer ({added:.1%} more memory) would lower "
            f"the largest load by {gain:.1%}, from {plan.objective:.3f} to "
            f"{more.objective:.3f} times the mean{_of_steps(plan, more)}: {worth} it."
        )
    gain, added = 1.0 - plan.objective / first.objective, plan.more_memory - first.more_memory
    if added <= 0.0:
        return (
            f"With {now} slots on each device, the plan has no more replicas than with "
            f"{first.num_slots}: the further slots are empty."
        )
    others = f" with {first.num_replicas}" if first.num_replicas else ""
    fall = (
        f"{_count(plan).capitalize()} replicas in each layer ({added:.1%} more memory) "
        f"lower the largest load by {gain:.1%}, from {first.objective:.3f}{others} to "
        f"{plan.objective:.3f} times the mean{_of_steps(first, plan)}"
    )
    if not _pays(gain, added):
        return f"{fall}: not worth their memory."
    enough = next(t for t in trials if t.objective <= plan.objective * _AS_GOOD)
    if enough.num_replicas < num_replicas:
        return (
            f"{fall}: worth it, but {_count(enough)} would do ({enough.objective:.3f}, for "
            f"{enough.more_memory - first.more_memory:.1%} more memory)."
        )
    return f"{fall}: worth their memory."


def _count(trial: ReplicaTrial) -> str:
    return f"{'' if trial.is_even else 'up to '}{trial.num_replicas}"


def _pays(gain: float, added: float) -> bool:
    """Returns whether the gain justifies the memory, which the KV cache does not get then."""
    return gain >= max(_WORTH, _OF_MEMORY * added)


def _of_steps(before: ReplicaTrial, after: ReplicaTrial) -> str:
    if before.step is None or after.step is None:
        return ""
    return f" (balancedness of single steps: {before.step:.3f} to {after.step:.3f})"


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Upper bounds of the balancedness by number of replicas.

    No plan with h replicas of a layer is better balanced than `best_H[h]`, the mean over layers and
    scenarios of mean / largest load. Only the hottest expert is considered, so real plans reach a
    little less.
    """

    best_H: Floats
    hottest_share: float  # share of the hottest expert in the worst layer and scenario
    hottest_over_even: float  # the same, over the even load of a device

    @classmethod
    def of(cls, problem: PlacementProblem, most: int | None = None) -> Redundancy:
        """Computes the bounds for up to `most` replicas in a layer; by default as many as the
        problem has, or twice its devices if that is more."""
        load = CopyLoad.of(problem)
        speed_D = np.array([device.speed for device in problem.devices.devices])
        if most is None:
            most = max(problem.num_replicas, 2 * len(speed_D))
        replicas_L = np.full(load.shares_SLE.shape[1], most)
        peaks = FewestPeaks.of(load, np.sort(speed_D)[::-1], replicas_L, len(speed_D))
        even_SL = load.totals() / speed_D.sum()
        best_HSL = 1.0 / np.maximum(peaks.peak_HSL / even_SL, 1.0)
        return cls(
            best_H=best_HSL.mean(axis=(1, 2)),
            hottest_share=float(load.shares_SLE.max()),
            hottest_over_even=float((peaks.peak_HSL[0] / even_SL).max()),
        )

    def needed(self, target: float) -> int | None:
        """Returns the fewest replicas of a layer with which `target` is not excluded; None if more
        than the examined number are needed."""
        enough = np.flatnonzero(self.best_H >= target)
        return int(enough[0]) if len(enough) else None
