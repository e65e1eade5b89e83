"""Code that decides by time reads the clock that it is given, never the `time` module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "moe_serve"
DECIDING = ("engine", "cluster/steps", "cluster/rebalance")
# Files that measure durations for reports and costs, or name files by the date.
MEASURING = frozenset(
    {
        "engine/build.py",  # seconds of loading
        "engine/tracing.py",  # the date in the name of a recording
        "engine/request/matcher.py",  # processor time of one thread
        "engine/sampling/answer_masks.py",  # the cost of a mask
        "engine/watch/hang_watch.py",  # the date in the name of a report
        "engine/watch/startup.py",  # seconds of the phases of the start
    }
)


def reads_time(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(name.name == "time" for name in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            return True
    return False


@pytest.mark.parametrize("room", DECIDING)
def test_what_decides_has_a_clock(room: str) -> None:
    reading = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / room).rglob("*.py")
        if reads_time(path)
    }
    assert reading <= MEASURING, f"{sorted(reading - MEASURING)} import `time`: take a Clock"


def test_the_list_of_measuring_files_is_true() -> None:
    assert all(reads_time(ROOT / name) for name in MEASURING)
