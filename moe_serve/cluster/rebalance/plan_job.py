"""What the planner's process is asked, and what it answers: msgpack on its input and its output.

S scenarios, L layers with routed experts, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from experts.placement.errors import PlacementError
from experts.placement.problem.devices import Device, Devices
from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import Move, PlacementProblem
from experts.placement.solution import Solver

SECONDS = 30.0  # that may be spent on a search


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """Loads and the placement in force."""

    counts: bytes  # float64 [S, L, E]
    layers: Sequence[int]
    scenarios: Sequence[str]
    num_experts: int
    ranks_of: Sequence[Sequence[Sequence[int]]]  # of each layer -> expert -> ranks
    slots: Sequence[int]  # of each rank, in a layer
    max_moves: int  # copies that a layer may get elsewhere
    top_k: int
    batch_size: int | None = None  # rows of a step, to balance activated experts; None: rows


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A placement, or `why` there is none."""

    ranks_of: Sequence[Sequence[Sequence[int]]] = ()
    solver: str = ""
    why: str | None = None


def problem_of(job: PlanJob) -> PlacementProblem:
    """Raises PlacementError where it has no plan."""
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
    """Raises PlacementError if it is none for the job's ranks and experts."""
    if len(ranks_of) != len(job.layers):
        raise PlacementError(f"{len(ranks_of)} layers are placed, of {len(job.layers)}.")
    return Placement(
        num_ranks=len(job.slots),
        num_experts=job.num_experts,
        ranks_of={
            layer: tuple(tuple(ranks) for ranks in experts)
            for layer, experts in zip(job.layers, ranks_of, strict=True)
        },
    )


def answer(job: PlanJob, solver: Solver) -> PlanAnswer:
    """Solve it."""
    try:
        solution = solver.solve(problem_of(job), seconds=SECONDS)
    except PlacementError as error:
        return PlanAnswer(why=str(error))
    return PlanAnswer(
        ranks_of=[solution.placement.ranks_of[layer] for layer in job.layers],
        solver=solution.solver,
    )
