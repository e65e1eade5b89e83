"""Plans placements in a separate process, so that no search holds the interpreter lock of the
process that steps.

python -m moe_serve.cluster.rebalance.planner

The process reads one PlanJob from standard input and writes its PlanAnswer to standard output, both
as msgpack. It loads no torch, and gives way to processes that compute steps. S scenarios, L layers
with routed experts, E experts, R ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from experts.placement.placement_error import PlacementError
from experts.placement.problem.devices import Device, Devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import Move, PlacementProblem
from experts.placement.solution import Solver
from experts.placement.solvers.search.search_solver import Search
from moe_serve.child_python import module_command

SECONDS = 30.0  # time for one search


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """The loads to plan for, and the placement in force."""

    counts: bytes  # float64 [S, L, E]
    layers: Sequence[int]
    scenarios: Sequence[str]
    num_experts: int
    ranks_of: Sequence[Sequence[Sequence[int]]]  # layer -> expert -> ranks
    slots: tuple[int, ...]  # of each rank in a layer
    max_moves: int  # most copies of a layer that may move
    top_k: int
    batch_size: int | None = None  # rows of a step, to balance activated experts; None: rows


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A placement, or in `why` the reason for which the planner found no placement."""

    ranks_of: Sequence[Sequence[Sequence[int]]] = ()
    solver: str = ""
    why: str | None = None


def problem_of(job: PlanJob) -> PlacementProblem:
    """Returns the placement problem of a job; raises PlacementError if it is inconsistent."""
    shape = (len(job.scenarios), len(job.layers), job.num_experts)
    loads = ExpertLoads(
        counts_SLE=np.frombuffer(job.counts, "<f8").reshape(shape),
        layers=tuple(job.layers),
        scenarios=tuple(job.scenarios),
    )
    return PlacementProblem(
        loads=loads,
        devices=Devices(devices=tuple(Device(node=0, num_slots=slots) for slots in job.slots)),
        balance="tokens" if job.batch_size is None else "activated",
        batch_size=job.batch_size or 1,
        top_k=job.top_k,
        move=Move(current=placement_of(job, job.ranks_of), max_copies_per_layer=job.max_moves),
        fill=False,
    )


def placement_of(job: PlanJob, ranks_of: Sequence[Sequence[Sequence[int]]]) -> Placement:
    """Returns a placement for the job's ranks and experts; raises PlacementError if it does not fit
    them."""
    if len(ranks_of) != len(job.layers):
        raise PlacementError(
            f"The planner placed {len(ranks_of)} layers instead of {len(job.layers)}."
        )
    return Placement(
        num_ranks=len(job.slots),
        num_experts=job.num_experts,
        ranks_of={
            layer: tuple(tuple(ranks) for ranks in experts)
            for layer, experts in zip(job.layers, ranks_of, strict=True)
        },
    )


def answer(job: PlanJob, solver: Solver) -> PlanAnswer:
    """Solves the job."""
    try:
        solution = solver.solve(problem_of(job), seconds=SECONDS)
    except PlacementError as error:
        return PlanAnswer(why=str(error))
    return PlanAnswer(
        ranks_of=[solution.placement.ranks_of[layer] for layer in job.layers],
        solver=solution.solver,
    )


Plan = Callable[[PlanJob], PlanAnswer]  # raises PlacementError

_MODULE = "moe_serve.cluster.rebalance.planner"
_SLACK_S = 60.0  # for the process to start on a busy machine, beyond SECONDS
_NICE = 15


def plan_in_process(job: PlanJob) -> PlanAnswer:
    """Starts a planner's process and waits for its answer; raises PlacementError if none comes."""
    try:
        ended = subprocess.run(
            module_command(_MODULE),
            input=msgspec.msgpack.encode(job),
            capture_output=True,
            timeout=SECONDS + _SLACK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlacementError(f"The planner's process gave no answer: {error}.") from error
    if ended.returncode:
        words = ended.stderr.decode(errors="replace").strip().splitlines()
        why = words[-1] if words else "it said nothing"
        raise PlacementError(f"The planner's process ended with status {ended.returncode}: {why}.")
    try:
        return msgspec.msgpack.decode(ended.stdout, type=PlanAnswer)
    except msgspec.MsgspecError as error:
        raise PlacementError(f"The planner's answer cannot be read: {error}.") from error


def main() -> None:
    """Answers one job."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PlanJob)
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(job, Search())))


if __name__ == "__main__":
    main()
