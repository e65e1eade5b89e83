"""Builds the report of a plan: its proof, its value beside other plans, and the cost of moving to
it.

The cost of moving is counted in copies, bytes and seconds. L layers, E experts, D devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import copies_of
from experts.placement.judge.held_out import HeldOut, NamedPlanner, hold_out
from experts.placement.judge.plan_judge import Ints, Judge, Judged
from experts.placement.judge.replicas_worth import Redundancy, ReplicaVerdict, judge_replicas
from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from experts.placement.problem_sources import ProblemWithSources
from experts.placement.solution import Solution, Solver
from experts.placement.solvers.choice import REFERENCES, make_solver


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The copies that devices must receive; each comes from the nearest device that holds its
    expert."""

    copies: int  # over all layers
    most_of_layer: int
    between_nodes: int  # part of `copies`
    num_bytes: int | None  # None if the bytes of an expert are unknown
    seconds: float | None  # time of the slowest device, sending or receiving

    @property
    def sentence(self) -> str:
        words = (
            f"{self.copies} copies, at most {self.most_of_layer} in a layer, {self.between_nodes} "
            "of them between nodes"
        )
        if self.num_bytes is None or self.seconds is None:
            return f"{words}; give --model or --bytes-per-expert to see bytes and seconds"
        return f"{words}: {self.num_bytes / 1e9:.3f} GB in {self.seconds:.2f} s"


def count_moves(problem: PlacementProblem, after: Placement) -> Moves | None:
    """Counts the moves; None without a current plan. Among equally near senders the one that has
    sent least so far is used."""
    if problem.move is None:
        return None
    layers, devices = problem.loads.layers, problem.devices
    before_LED = copies_of(problem.move.current, layers) > 0
    new_LED = (copies_of(after, layers) > 0) & ~before_LED
    node_D = np.array([device.node for device in devices.devices])
    within = 1.0 / devices.bytes_per_s_in_node
    between = 1.0 / devices.bytes_per_s_between_nodes
    sends_D, gets_D = np.zeros(len(devices)), np.zeros(len(devices))
    num_between = 0
    for layer, expert, device in zip(*np.nonzero(new_LED), strict=True):
        source = _source(before_LED[layer, expert], node_D, int(device), sends_D)
        is_between = node_D[source] != node_D[device]
        num_between += int(is_between)
        cost = between if is_between else within
        sends_D[source] += cost
        gets_D[device] += cost
    weight, copies = problem.bytes_per_expert, int(new_LED.sum())
    slowest = float(np.maximum(sends_D, gets_D).max())
    return Moves(
        copies=copies,
        most_of_layer=int(new_LED.sum(axis=(1, 2)).max()),
        between_nodes=num_between,
        num_bytes=None if weight is None else copies * weight,
        seconds=None if weight is None else slowest * weight,
    )


def _source(
    holds_D: NDArray[np.bool_],
    node_D: NDArray[np.int64],
    device: int,
    sends_D: NDArray[np.float64],
) -> int:
    """Chooses a device on the same node if there is one."""
    holders = np.flatnonzero(holds_D)
    near = holders[node_D[holders] == node_D[device]]
    candidates = near if len(near) else holders
    return int(candidates[sends_D[candidates].argmin()])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """All figures of a plan; parts that the inputs do not allow are None."""

    model: str
    problem: PlacementProblem
    solution: Solution
    plans: list[Judged]  # the plan before, the plan, the plan of other engines
    moves: Moves | None  # from the plan in use
    replicas: ReplicaVerdict | None
    held_out: HeldOut | None
    redundancy: Redundancy

    @property
    def plan(self) -> Judged:
        return next(each for each in self.plans if each.name == "plan")

    def as_json(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        problem, solution = self.problem, self.solution
        return {
            "problem": {
                "model": self.model,
                "layers": list(problem.loads.layers),
                "scenarios": list(problem.loads.scenarios),
                "experts": problem.loads.num_experts,
                "replicas": problem.num_replicas,
                "devices": len(problem.devices),
                "nodes": problem.devices.num_nodes,
                "slots": [device.num_slots for device in problem.devices.devices],
                "balance": problem.balance,
                "batch_size": problem.batch_size,
                "bytes_per_expert": problem.bytes_per_expert,
            },
            "solution": {
                "solver": solution.solver,
                "objective": solution.objective,
                "bound": solution.bound,
                "gap": solution.gap,
                "proof": solution.bound_proof,
                "seconds": solution.seconds,
                "is_complete": solution.is_complete,
            },
            "plans": [asdict(each) for each in self.plans],
            "moves": None if self.moves is None else asdict(self.moves),
            "replicas": None if self.replicas is None else asdict(self.replicas),
            "hottest_share": self.redundancy.hottest_share,
            "best_by_replicas": self.redundancy.best_H.round(6).tolist(),
            "held_out": None if self.held_out is None else asdict(self.held_out),
        }


Run = Callable[[Solver, PlacementProblem, float | None], Solution]


def run_solver(solver: Solver, problem: PlacementProblem, seconds: float | None) -> Solution:
    """Runs a solver without showing its progress."""
    return solver.solve(problem, seconds=seconds)


def make_report(
    sources: ProblemWithSources,
    solution: Solution,
    *,
    seconds: float | None = None,
    is_quick: bool = False,
    run: Run = run_solver,
    is_ended: Callable[[], bool] = lambda: False,
) -> PlanReport:
    """Builds the report. `run` makes each further plan within `seconds`; `is_quick` leaves these
    plans out. Once `is_ended` returns True, parts that are not done yet are left out."""
    problem, judge = sources.problem, Judge(sources.problem, sources.workloads.tokens)
    copies_LED = solution.copies()
    plans = [judge.judge(*_before(problem)), judge.judge("plan", copies_LED)]
    replicas = held_out = None
    if not is_quick:
        plans += _by_the_engines(sources, judge, run)
        search = _planner("search", 1, seconds, run)
        replicas = judge_replicas(problem, copies_LED, search.plan, judge.step)
        if is_ended():  # the trials were cut short
            replicas = None
        elif len(problem.loads.scenarios) > 1:
            held_out = _held_out(sources, solution, seconds, run, is_ended)
    return PlanReport(
        model=sources.workloads.model,
        problem=problem,
        solution=solution,
        plans=plans,
        moves=count_moves(problem, solution.placement),
        replicas=replicas,
        held_out=held_out,
        redundancy=Redundancy.of(problem),
    )


def _held_out(
    sources: ProblemWithSources,
    solution: Solution,
    seconds: float | None,
    run: Run,
    is_ended: Callable[[], bool],
) -> HeldOut:
    """Holds out scenarios with the same solver, except that the search replaces solvers that take
    minutes for each plan (`ilp`) or need more than loads (`fan-out`)."""
    name = solution.solver if solution.solver in REFERENCES else "search"
    groups = sources.num_groups
    return hold_out(
        sources.problem,
        solution.copies(),
        _planner(name, groups, seconds, run),
        _planner(sources.engine_default, groups, seconds, run),
        is_like_plan=name == solution.solver,
        is_ended=is_ended,
    )


def _planner(name: str, num_groups: int, seconds: float | None, run: Run) -> NamedPlanner:
    solver = make_solver(name, num_groups)
    return NamedPlanner(name, lambda problem: run(solver, problem, seconds).copies())


def _before(problem: PlacementProblem) -> tuple[str, Ints]:
    """Returns the plan in use, or the one that engines start with."""
    if problem.move is not None:
        return "current", copies_of(problem.move.current, problem.loads.layers)
    return "linear", make_solver("linear").solve(problem).copies()


def _by_the_engines(sources: ProblemWithSources, judge: Judge, run: Run) -> list[Judged]:
    """Judges EPLB if it applies: it supports equal devices only."""
    planner = _planner(sources.engine_default, sources.num_groups, None, run)
    try:
        copies_LED = planner.plan(sources.problem)
    except PlacementError:
        return []
    return [judge.judge(planner.name, copies_LED)]
