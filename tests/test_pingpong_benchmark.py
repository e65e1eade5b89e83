"""benchmarks/pingpong.py runs, and counts what it says it counts. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pingpong
from harness.pingpong.job import StepMarks
from harness.pingpong.points import point, stage_times

TINY = [
    "--no-pin", "--num-layers", "2", "--width", "64", "--num-heads", "2", "--num-kv-heads", "1",
    "--head-dim", "32", "--expert-width", "64", "--vocab-size", "128", "--batch", "12",
    "--context", "16", "--rounds", "1", "--delays", "0.5",
]  # fmt: skip
MS = 1_000_000


@pytest.mark.timeout(400)
def test_ablation_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pair.json"
    assert pingpong.main([*TINY, "--parts", "ablation", "--json", str(path)]) == 0
    found = json.loads(path.read_text("utf-8"))["ablation"]
    assert [p["num_micro_batches"] for p in found["cut"]] == 2 * [1, 2, 3, 4], found["cut"]
    assert [p["rows"] for p in found["cut"][:4]] == [12, 6, 4, 3], "the batch is not cut evenly"
    assert [p["rows"] for p in found["grown"][:4]] == 4 * [4], "micro-batches of other sizes"
    assert all(p["step_s"] > 0 for p in [*found["cut"], *found["grown"]]), "a step took no time"
    assert "m = 2 over m = 1" in capsys.readouterr().out, "no verdicts"


def test_deepspeed_that_is_not_there() -> None:
    times = pingpong.time_deepspeed({}, 6, "python-that-is-not-there", None)
    assert times.missing is not None and "not installed" in times.missing, times


def one_step(end: int) -> tuple[StepMarks, StepMarks]:
    """Two layers; T_a 3 ms, T_e 2 ms, T_c 1 ms: sent at 3, received at 4, sent at 6, back at 7."""
    ours = StepMarks(start=0, end=end, whole_end=end, received=[7 * MS, 14 * MS],
                     sent=[3 * MS, 10 * MS])  # fmt: skip
    theirs = StepMarks(start=0, end=end, whole_end=end, received=[4 * MS, 11 * MS],
                       sent=[6 * MS, 13 * MS])  # fmt: skip
    return ours, theirs


def test_stage_times() -> None:
    times = stage_times(8, [one_step(14 * MS)])
    assert times.attention_s == pytest.approx(3e-3), times
    assert times.experts_s == pytest.approx(2e-3), times
    assert times.transfer_s == pytest.approx(1e-3), times


@pytest.mark.parametrize(
    ("m", "formula_ms", "model_ms", "is_full"),
    [(1, 7 + 3, 2 * 7, False), (2, 7 + 3 * 3, 7 + 7 + 3, False), (3, 7 + 3 * 5, 9 + 7 + 6, True)],
)
def test_what_the_formulas_say(m: int, formula_ms: int, model_ms: int, is_full: bool) -> None:
    seen = [one_step(14 * MS)]
    found = point(seen, stage_times(8, seen), 2, m, 0.0)
    assert found.formula_s == pytest.approx(1e-3 * formula_ms), found
    assert found.model_s == pytest.approx(1e-3 * model_ms), found
    assert found.is_full == is_full, found
    assert found.step_s == pytest.approx(14e-3), found
