"""Makes solvers by name, and says which limits a solver keeps."""

from __future__ import annotations

from experts.placement.placement_error import PlacementInputError
from experts.placement.problem.devices import Devices
from experts.placement.problem.loads import TokenChoices
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Solver
from experts.placement.solvers.fan_out.fan_out_solver import FanOutOptions, FanOutSolver
from experts.placement.solvers.ilp.ilp_solver import IlpSolver
from experts.placement.solvers.references import Consecutive, Eplb, RoundRobin
from experts.placement.solvers.search.search_solver import Search

REFERENCES = ("linear", "round-robin", "eplb", "eplb-hierarchical")  # look at slots alone


def make_solver(name: str, num_groups: int = 1, *, thorough: bool = False) -> Solver:
    """Returns the solver `name`: search, ilp, or one of REFERENCES. With `thorough` the search uses
    all the time it is given; `num_groups` is for eplb-hierarchical."""
    if name == "search":
        return Search(thorough=thorough)
    if name == "ilp":
        return IlpSolver(Search())
    if name == "linear":
        return Consecutive()
    if name == "round-robin":
        return RoundRobin()
    return Eplb(num_groups, hierarchical=name == "eplb-hierarchical")


def fan_out_solver(base: Solver, tokens: TokenChoices | None, slack: float) -> Solver:
    """Returns a solver that starts from the plan of `base` and puts a token's experts on few nodes.
    Raises PlacementInputError if the choices of tokens are unknown."""
    if tokens is None:
        raise PlacementInputError(
            "--objective fan-out needs the choices of single tokens: give traces with --trace, all "
            "of the same top-k, and no tables of loads."
        )
    return FanOutSolver(tokens, base, FanOutOptions(cap=slack))


def engine_default(devices: Devices, num_groups: int) -> str:
    """Returns the method that SGLang and vLLM use by default: by groups if these divide over the
    nodes."""
    num_nodes = devices.num_nodes
    return "eplb-hierarchical" if num_nodes > 1 and num_groups % num_nodes == 0 else "eplb"


def check_limits(name: str, problem: PlacementProblem, num_groups: int) -> None:
    """Raises PlacementInputError for a limit that a reference solver would ignore: references look
    at slots alone."""
    if name not in REFERENCES:
        return
    is_limited = problem.move is not None and problem.move.max_copies_per_layer is not None
    keeps_groups = engine_default(problem.devices, num_groups) == name == "eplb-hierarchical"
    given = {
        "--pin": bool(problem.pins),
        "--max-moves": is_limited,
        "--groups": problem.grouping is not None and not keeps_groups,
    }
    ignored = [flag for flag, is_set in given.items() if is_set]
    if ignored:
        raise PlacementInputError(
            f"--solver {name} ignores {', '.join(ignored)}: leave them out, or plan with "
            "search or ilp."
        )
