"""Makes solvers by their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experts.placement.solvers.references.eplb_solver import Eplb
from experts.placement.solvers.references.plain import Linear, RoundRobin
from experts.placement.solvers.search.solver import Search
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from experts.placement.solution import Solver
    from moe_serve.cli.place.place_order import Posed


REFERENCES = ("linear", "round-robin", "eplb", "eplb-hierarchical")  # look at slots alone


def make_solver(name: str, posed: Posed, *, thorough: bool = False) -> Solver:
    """Returns the solver; with `thorough` the search uses all the time it is given."""
    if name == "search":
        return Search(thorough=thorough)
    if name == "ilp":
        from experts.placement.solvers.ilp.solver import IlpSolver

        return IlpSolver(Search())
    if name == "linear":
        return Linear()
    if name == "round-robin":
        return RoundRobin()
    return Eplb(groups_of(posed), hierarchical=name == "eplb-hierarchical")


def check_limits(name: str, posed: Posed) -> None:
    """Raises ConfigError for a limit that a reference solver would ignore: references look at slots
    alone."""
    if name not in REFERENCES:
        return
    problem = posed.problem
    is_limited = problem.move is not None and problem.move.max_copies_per_layer is not None
    keeps_groups = engine_default(posed) == name == "eplb-hierarchical"
    given = {
        "--pin": bool(problem.pins),
        "--max-moves": is_limited,
        "--groups": problem.grouping is not None and not keeps_groups,
    }
    ignored = [flag for flag, is_set in given.items() if is_set]
    if ignored:
        raise ConfigError(
            f"--solver {name} ignores {', '.join(ignored)}: leave them out, or plan with "
            "search or ilp."
        )


def fan_out_solver(base: Solver, posed: Posed, slack: float) -> Solver:
    """Returns a solver that starts from the plan of `base` and puts a token's experts on few nodes.
    Raises ConfigError."""
    if posed.workloads.tokens is None:
        raise ConfigError(
            "--objective fan-out needs the choices of single tokens: give traces with --trace, all "
            "of the same top-k, and no tables of loads."
        )
    from experts.placement.solvers.fan_out.solver import FanOutOptions, FanOutSolver

    return FanOutSolver(posed.workloads.tokens, base, FanOutOptions(cap=slack))


def engine_default(posed: Posed) -> str:
    """Returns the method that SGLang and vLLM use by default: by groups if these divide over the
    nodes."""
    num_nodes, groups = posed.problem.devices.num_nodes, groups_of(posed)
    return "eplb-hierarchical" if num_nodes > 1 and groups % num_nodes == 0 else "eplb"


def groups_of(posed: Posed) -> int:
    """Returns the number of expert groups, as requested or as the model's router has them; 1 means
    no groups."""
    grouping = posed.problem.grouping
    return posed.model.num_groups if grouping is None else grouping.num_groups
