"""The benchmarks of the simulator: published figures, and runs of the demonstration model."""

from __future__ import annotations

import math

import pytest

from moe_serve.simulate.costs.device import Efficiency
from simulation import at_once, own_runs, published_rows


def test_published_rows_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["published_rows"])
    assert published_rows.main() == 0
    lines = capsys.readouterr().out.splitlines()
    num_halves = len(published_rows.HALVES)
    assert len(lines) == len(published_rows.ROWS) + num_halves + 3
    assert lines[-2 - num_halves].startswith("median error ")
    assert all(line.startswith("two micro-batches, LMSYS") for line in lines[-1 - num_halves : -1])
    assert "226.9 by its rates (+0.1%)" in lines[-1]


def test_no_prediction_is_better_than_the_bound() -> None:
    for row in published_rows.ROWS:
        bound, value = (
            published_rows.predicted(row, shares) for shares in (published_rows.BOUND, None)
        )
        is_worse = value > bound if row.kind == "tpot" else value < bound
        is_possible = row.published > bound if row.kind == "tpot" else row.published < bound
        assert is_worse and is_possible, row.name


def test_shares_are_fitted_to_their_rows() -> None:
    """Together, rows are nearer to their figures than with the defaults."""
    rows = [row for row in published_rows.ROWS if row.device == "b200"]
    fitted = published_rows.fit_shares(rows)
    before, after = (
        sum(abs(math.log(published_rows.predicted(row, shares) / row.published)) for row in rows)
        for shares in (Efficiency(), fitted)
    )
    assert after < before


def test_the_table_of_requests_at_once_contradicts_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["at_once", "--requests", "40"])
    assert at_once.main() == 0
    first, second, own = capsys.readouterr().out.splitlines()
    assert "121,905 tokens/s, 9.0 times" in first and "22.6 such nodes" in second
    assert own.startswith("40 at once on 8 x h100")


def test_own_runs_are_simulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["own_runs", "--cpu-time", "--seconds", "0.05", "--most", "2"])
    assert own_runs.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("short 64/1024  closed 1 ")
    assert "all runs: 2" in lines
