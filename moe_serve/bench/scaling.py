"""Makes the autoscaler of a simulation, and its policy with the data that it needs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from moe_serve.bench.plan_loads import Progress, Wanted, means_of, most_seats, plan_table
from moe_serve.bench.simulated_cells import Scaling, serve_cells
from moe_serve.bench.simulated_requests import jobs_of
from moe_serve.bench.simulated_run import NO_REQUESTS, SimulatedRun
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.cluster.autoscale.autoscaler import Autoscaler, ScaleLimits
from moe_serve.cluster.autoscale.plan_table import PlanTable
from moe_serve.cluster.autoscale.policies import (
    Coming,
    OraclePolicy,
    PlannedPolicy,
    StaticPolicy,
    TargetPolicy,
    TokenMeans,
)
from moe_serve.cluster.autoscale.scale_plan import PlannedRole, ScalePlan, write_plan
from moe_serve.cluster.autoscale.scale_view import AutoscalePolicy
from moe_serve.errors import BenchError
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup
from moe_serve.simulate.coordinated.learnt_policy import LearntPolicy
from moe_serve.simulate.coordinated.scaled_cells import ScaleTimes

PolicyName = Literal["static", "target", "planned", "oracle", "learnt"]
_ATTAINMENT = 0.95
_USUAL_TARGET = 0.7
_FIRST_EXPLORATION = 0.5  # of the first day of training; it falls to 0 with the last


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """The options of autoscaling. `target`: the utilisation that the policy `target` keeps; None:
    found by simulation if there are limits of latency. `train_days`: the days that the policy
    `learnt` learns from."""

    policy: PolicyName
    min_cells: int
    times: ScaleTimes
    target: float | None
    train_days: int
    plan_out: Path | None = None  # of "planned": file for the plan, for a server


def scaled_run(run: SimulatedRun, request: ScaleRequest, progress: Progress) -> SimulatedRun:
    """Returns the run with an autoscaler. Raises BenchError."""
    setup = run.cells
    assert setup is not None, "the command has checked that there are cells"
    max_cells = Counter(plan.shape.role for plan in setup.plans)
    fewest = min(max_cells.values())
    if not 1 <= request.min_cells <= fewest:
        raise BenchError(f"--min-cells must be in [1, {fewest}], got {request.min_cells}.")
    limits = ScaleLimits(min_cells=request.min_cells, max_cells=max_cells)
    if request.policy == "oracle":
        limits = replace(limits, calm_s=0.0)
    policy = _policy(run, setup, request, limits, progress)
    return replace(run, scaling=Scaling(autoscaler=Autoscaler(policy, limits), times=request.times))


def _policy(
    run: SimulatedRun,
    setup: CellsSetup,
    request: ScaleRequest,
    limits: ScaleLimits,
    progress: Progress,
) -> AutoscalePolicy:
    if request.policy == "static":
        return StaticPolicy(limits.max_cells)
    slots = list(run.workload.slots())
    if not slots:
        raise BenchError(NO_REQUESTS)
    if request.policy == "target":
        return TargetPolicy(request.target or _target(run, setup, slots, progress))
    if request.policy == "learnt":
        return _trained(run, setup, request, limits, progress)
    if run.slo is None:
        raise BenchError(f"--autoscale {request.policy} plans for limits: give --slo.")
    wanted = Wanted(slo=run.slo, attainment=_ATTAINMENT)
    table = plan_table(setup, slots, wanted, progress)
    if request.policy == "oracle":
        return OraclePolicy(table, coming(slots))
    means = means_of(slots)
    if request.plan_out is not None:
        write_plan(_plan_of(setup, table, means, str(run.slo)), request.plan_out)
        progress(f"wrote {request.plan_out}")
    return PlannedPolicy(table, means)


def _plan_of(setup: CellsSetup, table: PlanTable, means: TokenMeans, slo: str) -> ScalePlan:
    """Returns a plan in the form of the file for a server."""
    ranks = {plan.shape.role: plan.shape.ranks for plan in reversed(setup.plans)}
    roles = {
        role: PlannedRole(
            ranks=ranks[role],
            prompt_tok_s=rates.prompt_tok_s,
            output_tok_s=rates.output_tok_s,
            most_load=table.most_load[role],
        )
        for role, rates in table.rates.items()
    }
    return ScalePlan(slo=slo, prompt_tokens=means.prompt, output_tokens=means.output, roles=roles)


def _target(
    run: SimulatedRun, setup: CellsSetup, slots: Sequence[Slot], progress: Progress
) -> float:
    if run.slo is None:
        return _USUAL_TARGET
    wanted = Wanted(slo=run.slo, attainment=_ATTAINMENT)
    return most_seats(setup, slots, wanted, progress) or _USUAL_TARGET


def coming(slots: Sequence[Slot]) -> Coming:
    """Returns a function that gives the requests of the workload between two moments."""
    at = [slot.at_s for slot in slots]
    prompts = [0, *accumulate(slot.prompt_tokens for slot in slots)]
    outputs = [0, *accumulate(slot.output_tokens for slot in slots)]

    def between(begin_s: float, end_s: float) -> tuple[int, int, int]:
        a, b = bisect_left(at, begin_s), bisect_left(at, end_s)
        return b - a, prompts[b] - prompts[a], outputs[b] - outputs[a]

    return between


def _trained(
    run: SimulatedRun,
    setup: CellsSetup,
    request: ScaleRequest,
    limits: ScaleLimits,
    progress: Progress,
) -> LearntPolicy:
    """Lets a policy learn on days like the run's, with other random requests."""
    policy = LearntPolicy(run.workload.seed)
    for day in range(request.train_days):
        policy.begin_day(_FIRST_EXPLORATION * (1 - day / request.train_days))
        workload = replace(run.workload, seed=run.workload.seed + 1 + day)
        scaling = Scaling(autoscaler=Autoscaler(policy, limits), times=request.times)
        jobs = jobs_of(list(workload.slots()), workload.seed)
        served = serve_cells(setup, jobs, workload.concurrency, scaling=scaling)
        scale = served.figures.scale
        assert scale is not None, "cells were scaled"
        progress(f"learnt day {day + 1} of {request.train_days}: {scale.device_hours:.1f} hours")
    policy.begin_day(0.0)
    return policy
