"""The benchmarks of the simulator: published figures, and runs of the demonstration model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import pytest

from make_random_model import Sizes, write_random_model
from moe_serve.bench.workload.trace_rows import read_trace
from moe_serve.planning import measured_model
from moe_serve.simulate.costs.device import Efficiency
from simulation import at_once, autoscaling, own_runs, published_rows, servegen_day

SIZES = Sizes(
    num_layers=2, width=64, num_heads=2, num_kv_heads=1, head_dim=32,
    num_experts=8, top_k=2, expert_width=32, vocab_size=512, max_positions=1024,
)  # fmt: skip


def test_published_rows_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["published_rows"])
    assert published_rows.main() == 0
    lines = capsys.readouterr().out.splitlines()
    num_rows, num_halves = len(published_rows.ROWS), len(published_rows.HALVES)
    ratios = lines[num_rows + 2 : -1]
    assert lines[num_rows + 1].startswith("median error ")
    assert all(line.startswith("two micro-batches, LMSYS") for line in ratios[:num_halves])
    assert len(ratios) == num_halves + len(published_rows.BALANCED)
    assert all(line.startswith("balanced experts, LMSYS") for line in ratios[num_halves:])
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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_model, "_CACHE_BYTES", 2**24)  # of 1 GB, which are zeroed
    write_random_model(tmp_path, "qwen3_moe", SIZES, dtype="float32", seed=0, shard_bytes=2**29)
    few = ["--cpu-time", "--seconds", "0.05", "--most", "2"]
    monkeypatch.setattr("sys.argv", ["own_runs", "--model", str(tmp_path), *few])
    assert own_runs.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("short 64/1024  closed 1 ")
    assert "all runs: 2" in lines


def test_a_day_of_recorded_rates_becomes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two clients, one of which sends in the second and third ten minutes of day 1, the third time
    twice as much."""
    (tmp_path / "chunk-0-trace.csv").write_text(
        "0,9.0,1.0,Gamma,1.0,1.0\n86400,0,0,,0,0\n87000,0.1,1,Weibull,1.0,10\n"
        "87600,0.2,1,Gamma,1.0,5\n"
    )
    (tmp_path / "chunk-1-trace.csv").write_text("172800,5.0,1.0,Gamma,1.0,1.0\n")
    lengths, out = tmp_path / "lengths.csv", tmp_path / "day.csv"
    lengths.write_text("at_s,prompt_tokens,output_tokens\n0,100,10\n1,200,20\n")
    words = [str(tmp_path), "--lengths", str(lengths), "--out", str(out), "--rate", "0.02"]
    assert servegen_day.main(words) == 0
    rows = read_trace(out).rows
    at = np.array([row.at_s for row in rows])  # the first request, early in its window, is at 0
    first, second = sum(at < 600), sum((at >= 600) & (at < 1200))
    assert len(rows) == pytest.approx(0.02 * 86_400, rel=0.1)
    assert first + second == pytest.approx(len(rows), rel=0.02)
    assert second == pytest.approx(2 * first, rel=0.2)
    assert {(row.prompt_tokens, row.output_tokens) for row in rows} == {(100, 10), (200, 20)}


def test_a_kept_simulation_is_run_again_only_with_other_options(tmp_path: Path) -> None:
    options = argparse.Namespace(
        trace=None, recorded=False, rate=0.1, hours=1.0, train_days=2, policies=["static"], jobs=1
    )
    first = autoscaling.arguments("static", 0, options, tmp_path)
    assert first == autoscaling.arguments("static", 0, options, tmp_path)
    others = [autoscaling.arguments("static", 1, options, tmp_path)]
    options.rate = 0.2
    others += [autoscaling.arguments(p, 0, options, tmp_path) for p in ("static", "target 0.7")]
    assert len({words[-1] for words in [first, *others]}) == 4
