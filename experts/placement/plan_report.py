"""Builds the report of a plan: its proof, its value beside other plans, and the cost of moving to
it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from experts.placement.errors import PlacementError
from experts.placement.judge.copies import copies_of
from experts.placement.judge.held_out import HeldOut, hold_out
from experts.placement.judge.moves import Moves, count_moves
from experts.placement.judge.plan_judge import Ints, Judge, Judged, solution_copies
from experts.placement.judge.redundancy import Redundancy
from experts.placement.judge.replicas_worth import ReplicaVerdict, judge_replicas
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Solution
from experts.placement.sources import Posed
from moe_serve.cli.place.place_solve import Interrupts, engine_default, make_solver, solve


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


def make_report(
    posed: Posed,
    solution: Solution,
    seconds: float | None,
    interrupts: Interrupts,
    *,
    is_quick: bool,
) -> PlanReport:
    """Builds the report. `seconds` limits each further plan; `is_quick` leaves these plans out.
    After Ctrl-C, parts that are not done yet are left out."""
    problem, judge = posed.problem, Judge(posed)
    copies_LED = solution_copies(solution, problem)
    plans = [judge.judge(*_before(posed)), judge.judge("plan", copies_LED)]
    replicas = held_out = None
    if not is_quick:
        plans += _by_the_engines(posed, judge, interrupts)
        solver = make_solver("search", posed)
        replicas = judge_replicas(
            problem, copies_LED, lambda p: solve(solver, p, seconds, interrupts), judge.step
        )
        if interrupts.has_come:  # the trials were cut short
            replicas = None
        elif len(problem.loads.scenarios) > 1:
            held_out = hold_out(posed, solution, seconds, interrupts)
    return PlanReport(
        model=posed.workloads.model,
        problem=problem,
        solution=solution,
        plans=plans,
        moves=count_moves(problem, solution.placement),
        replicas=replicas,
        held_out=held_out,
        redundancy=Redundancy.of(problem),
    )


def _before(posed: Posed) -> tuple[str, Ints]:
    """Returns the plan in use, or the one that engines start with."""
    problem = posed.problem
    if problem.move is not None:
        return "current", copies_of(problem.move.current, problem.loads.layers)
    return "linear", solution_copies(make_solver("linear", posed).solve(problem), problem)


def _by_the_engines(posed: Posed, judge: Judge, interrupts: Interrupts) -> list[Judged]:
    """Judges EPLB if it applies: it supports equal devices only."""
    name = engine_default(posed)
    try:
        solution = solve(make_solver(name, posed), posed.problem, None, interrupts)
    except PlacementError:
        return []
    return [judge.judge(name, solution_copies(solution, posed.problem))]
