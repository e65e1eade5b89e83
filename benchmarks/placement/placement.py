"""Compares placement plans with EPLB's plans and with their bounds.

    python benchmarks/run.py placement --json build/placement.json
    python benchmarks/run.py placement --trace gptoss20b_tokens.npz --parts balance speed

Each part is a file in `benchmarks/placement/parts`. For one thread, set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from placement.part import PartResult, Run, Setting
from placement.switches import SWITCHES

_FOLDER = Path(__file__).parent / "parts"
_FIRST = ("balance", "scenarios", "replan", "speed")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    setting = Setting(
        trace=options.trace,
        published=options.published,
        quick=options.quick,
        without=tuple(options.without),
    )
    found: list[PartResult] = []
    for name in options.parts:
        run: Run = importlib.import_module(f"placement.parts.{name}").run
        for result in run(setting):
            _print(result)
            found.append(result)
    bars = [bar for result in found for bar in result.bars]
    print("\nBars")
    for bar in bars:
        print(f"  {bar}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "machine": f"{platform.machine()}, Python {platform.python_version()}, "
            f"numpy {np.__version__}",
            "results": [asdict(result) for result in found],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def part_names() -> list[str]:
    """Returns the names of the files in the folder, the usual ones first."""
    names = {path.stem for path in _FOLDER.glob("*.py")} - {"__init__"}
    return [*_FIRST, *sorted(names - set(_FIRST))]


def _print(result: PartResult) -> None:
    cells = [[str(row.get(name, "")) for name in result.columns] for row in result.rows]
    widths = [
        max(len(column), *(len(row[index]) for row in cells))
        for index, column in enumerate(result.columns)
    ]
    print(f"\n{result.title}")
    for line in [list(result.columns), *cells]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )
    for note in result.notes:
        print(f"  ({note})")
    print(end="", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="npz of a recorded routing of gpt-oss-20b")
    parser.add_argument("--published", type=Path, help="eplb.py as published: timed beside")
    parser.add_argument("--parts", nargs="+", choices=part_names(), default=part_names())
    parser.add_argument("--quick", action="store_true", help="few layers, to try it out")
    parser.add_argument(
        "--without",
        nargs="+",
        default=(),
        choices=tuple(SWITCHES),
        help="parts of the solvers that the ablation leaves out, one at a time; default: each",
    )
    parser.add_argument("--json", type=Path)
    return parser
