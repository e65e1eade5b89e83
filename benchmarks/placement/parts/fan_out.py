"""Measures the nodes and devices of a token, and the rows that cross between nodes, beside the
balance.

Plans are made on half of the prompts of a trace and judged on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from experts.placement.judge.balance import balancedness
from experts.placement.judge.copies import copies_of
from experts.placement.judge.plan_judge import FanOut, measure_fan_out
from experts.placement.problem.devices import Devices, even_devices
from experts.placement.problem.placement import Placement
from experts.placement.problem.problem import PlacementProblem
from experts.placement.solvers.fan_out.fan_out_solver import FanOutSolver
from experts.placement.solvers.fan_out.layer_descent import relabelled
from experts.placement.solvers.references import Eplb
from experts.placement.solvers.search.search_solver import Search
from placement.inputs import Halves, read_halves
from placement.part import Bar, PartResult, Setting, Stopwatch, timed

_CELLS = ((8, 2), (16, 4))  # devices, nodes; the targets are for the first
_COLUMNS = (
    "plan",
    "nodes/token",
    "devices/token",
    "cross-node pairs",
    "rows to other nodes",
    "balance",
    "in sample",
    "s",
    "cpu s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """The figures of a plan on tokens for which it was not made."""

    fan_out: FanOut
    balance: float
    row: dict[str, object]


def run(setting: Setting) -> Iterator[PartResult]:
    """Yields the results; there are none without a trace."""
    if setting.trace is None:
        return
    halves = read_halves(setting.trace)
    for num_devices, num_nodes in _CELLS[:1] if setting.quick else _CELLS:
        devices = even_devices(num_devices, num_nodes, halves.planned.num_experts)
        found = list(_plans(halves, devices))
        is_first = (num_devices, num_nodes) == _CELLS[0]
        yield PartResult(
            title=f"Fan-out, gpt-oss-20b, {num_devices} devices on {num_nodes} nodes, held out",
            columns=_COLUMNS,
            rows=[judged.row for judged in found],
            bars=_bars(found[0], found[-1]) if is_first else [],
            notes=["pairs: of experts in consecutive layers; rows: from evenly spread homes"],
        )


def _plans(halves: Halves, devices: Devices) -> Iterator[_Judged]:
    problem = PlacementProblem(loads=halves.planned.loads("half"), devices=devices)
    with timed() as watch:
        eplb = Eplb().solve(problem).placement
    yield _judged("eplb", eplb, halves, devices, watch)
    with timed() as watch:
        moved = relabelled(eplb, halves.planned, devices)
    yield _judged("eplb, relabelled", moved, halves, devices, watch)
    with timed() as watch:
        search = Search().solve(problem).placement
    yield _judged("search", search, halves, devices, watch)
    with timed() as watch:
        fan_out = FanOutSolver(halves.planned).solve(problem).placement
    yield _judged("fan-out", fan_out, halves, devices, watch)


def _judged(
    plan: str, placement: Placement, halves: Halves, devices: Devices, watch: Stopwatch
) -> _Judged:
    found = measure_fan_out(placement, halves.held_out, devices)
    held, own = (
        balancedness(
            PlacementProblem(loads=choices.loads("all"), devices=devices),
            copies_of(placement, choices.layers),
        )["all"]
        for choices in (halves.held_out, halves.planned)
    )
    row: dict[str, object] = {
        "plan": plan,
        "nodes/token": f"{found.nodes_per_token:.3f}",
        "devices/token": f"{found.devices_per_token:.3f}",
        "cross-node pairs": f"{found.cross_node_pairs:.3f}",
        "rows to other nodes": f"{found.cross_node_rows:.3f}",
        "balance": f"{held.mean:.3f}/{held.worst:.3f}",
        "in sample": f"{own.mean:.3f}/{own.worst:.3f}",
        "s": f"{watch.wall_s:.1f}",
        "cpu s": f"{watch.cpu_s:.1f}",
    }
    return _Judged(fan_out=found, balance=held.mean, row=row)


def _bars(eplb: _Judged, ours: _Judged) -> list[Bar]:
    nodes = 1 - ours.fan_out.nodes_per_token / eplb.fan_out.nodes_per_token
    pairs = 1 - ours.fan_out.cross_node_pairs / eplb.fan_out.cross_node_pairs
    balance = 1 - ours.balance / eplb.balance
    return [
        _bar("distinct nodes per token below EPLB's", nodes, 0.14),
        _bar("cross-node pairs of consecutive layers below EPLB's", pairs, 0.30),
        Bar(
            name="fan-out: balance below EPLB's",
            wanted="3% at most",
            got=f"{balance:.1%}",
            is_met=balance <= 0.03,
        ),
    ]


def _bar(name: str, got: float, wanted: float) -> Bar:
    return Bar(
        name=f"fan-out: {name}",
        wanted=f"{wanted:.0%} at least",
        got=f"{got:.1%}",
        is_met=got >= wanted,
    )
