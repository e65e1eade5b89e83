"""Builds the report of a plan: its proof, its value beside other plans, and the cost of moving to
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from experts.placement.judge.copies import copies_of
from experts.placement.judge.held_out import HeldOut, NamedPlanner, hold_out
from experts.placement.judge.moves import Moves, count_moves
from experts.placement.judge.plan_judge import Ints, Judge, Judged
from experts.placement.judge.replicas_worth import Redundancy, ReplicaVerdict, judge_replicas
from experts.placement.placement_error import PlacementError
from experts.placement.problem.problem import PlacementProblem
from experts.placement.problem_sources import ProblemWithSources
from experts.placement.solution import Solution, Solver
from experts.placement.solvers.choice import REFERENCES, make_solver


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
