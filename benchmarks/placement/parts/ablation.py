"""Leaves out one part of the solvers at a time, with the CPU time that all parts together took.

A part is worth its code if plans are worse without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np

from experts.placement.judge.plan_judge import measure_fan_out
from experts.placement.problem.devices import even_devices
from experts.placement.problem.loads import ExpertLoads, TokenChoices
from experts.placement.problem.plan_limits import Move
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solution import Progress, Solution, Solver
from experts.placement.solvers.fan_out.fan_out_solver import FanOutOptions, FanOutSolver
from experts.placement.solvers.ilp.ilp_solver import IlpSolver
from experts.placement.solvers.search import watch
from experts.placement.solvers.search.improve import Effort
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import read_halves, workloads, zipf_loads
from placement.part import PartResult, Setting, balance_of, figures, scenario
from placement.switches import SWITCHES, without

_COLUMNS = ("problem", "without", "balance", "gap", "figure", "CPU s", "budget")
_ENDLESS = 1_000_000  # rounds: the budget ends them
_ILP_S = 6.0
_WALL = 20.0  # a run also ends at this multiple of its CPU budget, in wall time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A problem and its solver. `endless` makes the solver run until its budget is spent."""

    name: str
    kind: str
    problem: PlacementProblem
    usual: Callable[[], Solver]
    endless: Callable[[], Solver]
    choices: TokenChoices | None = None
    budget_s: float | None = None


def run(setting: Setting) -> Iterator[PartResult]:
    """Yields one table for each problem."""
    names = setting.without or tuple(SWITCHES)
    for case in _cases(setting):
        switches = [name for name in names if case.kind in _kinds(name)]
        if switches:
            yield _table(case, switches)


def _kinds(name: str) -> set[str]:
    """Returns the kinds of a switch; "small fan-out" is one kind."""
    kind = SWITCHES[name].kind
    return {kind} if kind == "small fan-out" else set(kind.split())


def _table(case: _Case, switches: list[str]) -> PartResult:
    rows = []
    solution, spent = _solved(case, case.usual, None, case.budget_s)
    budget_s = max(spent, 0.05) if case.budget_s is None else case.budget_s
    rows.append(_row(case, "nothing, usual effort", solution, spent, budget_s))
    for name in [None, *switches]:
        found, spent = _solved(case, case.endless, name, budget_s)
        rows.append(_row(case, name or "nothing", found, spent, budget_s))
    return PartResult(title=f"ablation: {case.name}", columns=_COLUMNS, rows=rows)


def _solved(
    case: _Case, make: Callable[[], Solver], name: str | None, budget_s: float | None
) -> tuple[Solution, float]:
    began = time.process_time()

    def goes_on(_: Progress) -> bool:
        return budget_s is None or time.process_time() - began < budget_s

    seconds = None if budget_s is None else max(60.0, _WALL * budget_s)
    with without(name), patch.object(watch, "_BETWEEN_S", 0.0):
        solution = make().solve(case.problem, seconds=seconds, report=goes_on)
    return solution, time.process_time() - began


def _row(
    case: _Case, name: str, solution: Solution, spent: float, budget_s: float
) -> dict[str, object]:
    figure = ""
    if case.choices is not None:
        found = measure_fan_out(solution.placement, case.choices, case.problem.devices)
        figure = f"{found.nodes_per_token:.4f} nodes, {found.devices_per_token:.4f} devices"
    elif case.problem.move is not None:
        figure = f"{_moved(case.problem, solution):.1f} moves"
    return {
        "problem": case.name,
        "without": name,
        "balance": figures(balance_of(case.problem, solution)),
        "gap": f"{solution.gap:.3%}",
        "figure": figure,
        "CPU s": round(spent, 2),
        "budget": round(budget_s, 2),
    }


def _moved(problem: PlacementProblem, solution: Solution) -> float:
    assert problem.move is not None, "moves are counted"
    before, after = problem.move.current.ranks_of, solution.placement.ranks_of
    moved = [
        len(set(now) - set(then))
        for layer in after
        for now, then in zip(after[layer], before[layer], strict=True)
    ]
    return sum(moved) / len(after)


def _searched(
    name: str, kind: str, loads: ExpertLoads, num_devices: int, num_replicas: int, **more: object
) -> _Case:
    devices = even_devices(num_devices, 1, loads.num_experts + num_replicas)
    problem = replace(PlacementProblem(loads=loads, devices=devices), **more)  # type: ignore[arg-type]
    return _of_problem(f"{name}, {num_devices} devices, {num_replicas} replicas", kind, problem)


def _of_problem(name: str, kind: str, problem: PlacementProblem) -> _Case:
    num_scenarios, num_layers, _ = problem.loads.counts_SLE.shape
    slots = sum(device.num_slots for device in problem.devices.devices)

    def endless() -> Solver:
        effort = Effort.usual(num_scenarios, slots * num_layers, len(problem.devices))
        return Search(effort=replace(effort, rounds=_ENDLESS, patience=_ENDLESS))

    is_finite = kind in ("small", "anew")  # the part comes after the search
    return _Case(
        name=name,
        kind=kind,
        problem=problem,
        usual=Search,
        endless=Search if is_finite else endless,
        budget_s=_ILP_S if is_finite else None,
    )


def _cases(setting: Setting) -> Iterator[_Case]:
    few = setting.quick
    if setting.trace is not None:
        whole = read_halves(setting.trace).whole.loads("all")
        for cell in ((8, 0), (8, 8), (16, 16), (32, 32)):
            yield _searched("gpt-oss-20b", "one", whole, *cell)
    one, twelve = workloads(1, 2 if few else 58, 256), workloads(12, 2 if few else 15, 256)
    for cell in ((32, 32), (64, 64)):
        yield _searched("one workload", "one", one, *cell)
    yield _searched("twelve workloads", "many", twelve, 32, 32)
    for name, loads in (
        ("one workload", workloads(1, 2 if few else 61, 256)),
        ("Zipf 0.8", zipf_loads(2 if few else 61, 256)),
    ):
        yield _searched(name, "large", loads, 128, 128)
    yield from _moving(twelve)
    small = workloads(1, 8, 16)
    for num_replicas in (8, 32):
        for balance in ("tokens", "activated"):
            name = f"{balance}, slots may be empty"
            yield _searched(
                name, "open", small, 8, num_replicas, fill=False, balance=balance, top_k=2
            )
    yield _searched("activated, slots may be empty", "open", twelve, 32, 32, fill=False,
                    balance="activated", top_k=8)  # fmt: skip
    yield _searched("small layers", "small", workloads(1, 8, 8), 4, 0)
    yield _searched("small layers", "small", workloads(1, 8, 8), 2, 2)
    yield from _programs(setting)
    yield from _fan_outs(setting)


def _moving(loads: ExpertLoads) -> Iterator[_Case]:
    """Returns the problem of changing from the plan of one workload to another workload."""
    devices = even_devices(32, 1, 288)
    problem = PlacementProblem(loads=scenario(loads, 1), devices=devices)
    old = PlacementProblem(loads=scenario(loads, 0), devices=devices)
    current = Search().solve(old).placement
    for budget in (4, 8, 16):
        move = Move(current=current, max_copies_per_layer=budget)
        yield _of_problem(f"at most {budget} moves", "moves", replace(problem, move=move))
    anew = replace(problem, move=Move(current=current))
    yield _of_problem("planned anew, moves counted", "anew", anew)


def _programs(setting: Setting) -> Iterator[_Case]:
    """Returns the small problems of the part `ilp`."""
    made_up, devices = workloads(2, 4, 16), even_devices(4, 1, 20)
    now, then = (scenario(made_up, index) for index in range(2))
    current = Search().solve(PlacementProblem(loads=now, devices=devices)).placement
    problems = {
        f"16 experts, 4 devices, {moves} moves": PlacementProblem(
            loads=then, devices=devices, move=Move(current=current, max_copies_per_layer=moves)
        )
        for moves in (1, 2, 4)
    }
    if setting.trace is not None:
        loads = read_halves(setting.trace).whole.loads("all")
        rows = slice(0, None, 4)
        some = replace(loads, counts_SLE=loads.counts_SLE[:, rows], layers=loads.layers[rows])
        for cell in ((4, 0), (8, 8)):
            problems[f"gpt-oss-20b, {cell[0]} devices, {cell[1]} replicas"] = PlacementProblem(
                loads=some, devices=even_devices(cell[0], 1, 32 + cell[1])
            )
    for name, problem in problems.items():
        yield _Case(
            name=f"ilp: {name}", kind="ilp", problem=problem, usual=IlpSolver, endless=IlpSolver,
            budget_s=1.0 if setting.quick else _ILP_S,
        )  # fmt: skip


def _fan_outs(setting: Setting) -> Iterator[_Case]:
    if setting.trace is not None:
        choices = read_halves(setting.trace).planned
        cells = ((8, 2, 0),) if setting.quick else ((8, 2, 0), (16, 4, 0), (16, 4, 16))
        for num_devices, num_nodes, num_replicas in cells:
            name = f"fan-out: gpt-oss-20b, {num_devices} devices on {num_nodes} nodes"
            yield _fan_out(
                f"{name}, {num_replicas} replicas", "fan-out", choices,
                (num_devices, num_nodes, 32 + num_replicas), FanOutOptions(),
            )  # fmt: skip
    many = _tokens(num_tokens=500 if setting.quick else 4000, num_experts=128, top_k=8)
    yield _fan_out(
        "fan-out: 128 experts, 16 devices on 4 nodes", "fan-out", many, (16, 4, 144),
        FanOutOptions(),
    )  # fmt: skip
    choices, options = _tokens(120, 8, 2), FanOutOptions(exact_slice_s=10.0)
    yield _fan_out("fan-out: 8 experts", "small fan-out", choices, (4, 2, 8), options)


def _tokens(num_tokens: int, num_experts: int, top_k: int) -> TokenChoices:
    """Returns invented tokens of four kinds, each of which prefers other experts of four layers."""
    random = np.random.default_rng(5)
    liking_KLE = random.normal(0.0, 1.0, (4, 4, num_experts))
    noise_NLE = random.gumbel(0.0, 1.0, (num_tokens, 4, num_experts))
    score_NLE = liking_KLE[random.integers(4, size=num_tokens)] + noise_NLE
    ids_NLK = np.argsort(-score_NLE, axis=2)[:, :, :top_k]
    return TokenChoices(expert_ids_NLK=ids_NLK, num_experts=num_experts, layers=(0, 1, 2, 3))


def _fan_out(
    name: str, kind: str, choices: TokenChoices, shape: tuple[int, int, int], options: FanOutOptions
) -> _Case:
    devices = even_devices(*shape)
    problem = PlacementProblem(loads=choices.loads("half"), devices=devices)
    return _Case(
        name=name,
        kind=kind,
        problem=problem,
        usual=lambda: FanOutSolver(choices, options=options),
        # programs come after the sweeps
        endless=lambda: FanOutSolver(
            choices,
            options=options if options.exact_slice_s else replace(options, max_sweeps=_ENDLESS),
        ),
        choices=choices,
        budget_s=_ILP_S if options.exact_slice_s else None,
    )
