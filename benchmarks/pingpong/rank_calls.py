"""Measures what single calls save on ranks: CPU time and calls from Python of a decode step.

    python benchmarks/run.py rank_calls moe_serve/demo_model

One attention and one expert rank run the same steps with each layer as one call and in parts, in
turns. benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .job import StepMarks
from .pair import Pair, started_pair
from .way import OneHost

_SIDES = ("attention rank", "expert rank")
_SPOILED = 3  # first steps of a series


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCost:
    """The cost of a step for a rank: CPU time in us, and calls from Python for each layer."""

    side: str
    rows: int
    single_us: float
    parted_us: float
    single_calls: float
    parted_calls: float
    ratios: list[float]  # of the CPU times of neighbouring turns, sorted


def main() -> int:
    arguments = _parser().parse_args()
    costs = []
    largest = max(arguments.rows)
    with started_pair(arguments.model, arguments.context, largest, None, OneHost()) as pair:
        for rows in arguments.rows:
            for cost in side_costs(pair, rows, arguments.rounds, arguments.steps):
                costs.append(cost)
                _print(cost)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1))
    return 0


def side_costs(pair: Pair, rows: int, rounds: int, num_steps: int) -> list[SideCost]:
    """Returns the costs of decode steps of some rows, of both sides."""
    single: list[list[float]] = [[], []]
    parted: list[list[float]] = [[], []]
    steps = [[rows]] * (num_steps + _SPOILED)
    for _ in range(rounds):
        for is_parted, found in ((False, single), (True, parted)):
            marks = pair.take_steps(0.0, steps, is_parted=is_parted, is_timed=False)[_SPOILED:]
            for side in (0, 1):
                found[side].append(statistics.median(each[side].cpu for each in marks) / 1e3)
    counts = [
        pair.take_steps(0.0, [[rows]] * 3, is_parted=is_parted, is_counted=True, is_timed=False)[-1]
        for is_parted in (False, True)
    ]
    return [
        SideCost(
            side=name,
            rows=rows,
            single_us=statistics.median(single[side]),
            parted_us=statistics.median(parted[side]),
            single_calls=_calls(counts[0], side, pair),
            parted_calls=_calls(counts[1], side, pair),
            ratios=sorted(b / a for a, b in zip(single[side], parted[side], strict=True)),
        )
        for side, name in enumerate(_SIDES)
    ]


def _calls(marks: Sequence[StepMarks], side: int, pair: Pair) -> float:
    return marks[side].num_calls / pair.num_layers


def _print(cost: SideCost) -> None:
    ratios = cost.ratios
    sys.stdout.write(
        f"{cost.side:15}{cost.rows:4} rows: CPU time of a step {cost.parted_us:7.0f} us in parts, "
        f"{cost.single_us:7.0f} us with single calls: {statistics.median(ratios):.2f}x "
        f"[{ratios[0]:.2f}, {ratios[-1]:.2f}]; calls from Python of a layer "
        f"{cost.parted_calls:.0f} -> {cost.single_calls:.0f}\n"
    )
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="checkpoint folder in Hugging Face layout")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser
