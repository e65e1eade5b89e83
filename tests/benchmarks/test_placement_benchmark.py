"""The benchmark of planning runs, finds its parts, and splits a trace as it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from placement import placement
from placement.inputs import distances, read_halves, workloads
from placement.part import average, scenario, without


def test_a_part_prints_its_rows_and_whether_bars_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(placement.part_names()) >= {"balance", "scenarios", "replan", "speed"}
    report = tmp_path / "report.json"
    assert placement.main(["--quick", "--parts", "replan", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "met: 8 moves a layer recover what drift lost" in printed
    (result,) = json.loads(report.read_text("utf-8"))["results"]
    moved = {row["moves"]: row["copies a layer"] for row in result["rows"]}
    assert moved["at most 8"] <= 8 < moved["anew"] < moved["EPLB"]


def test_halves_have_other_prompts_and_none_that_repeats(tmp_path: Path) -> None:
    experts = np.arange(6, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 1), np.uint8)
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        experts=experts,
        sample=np.array([0, 0, 1, 2, 3, 3]),
        sample_name=np.array(["a|x|False", "b|x|True", "c|x|False", "d|x|False"]),
    )
    halves = read_halves(path)
    assert halves.whole.expert_ids_NLK[:, 0, 0].tolist() == [0, 1, 3, 4, 5]
    assert halves.planned.expert_ids_NLK[:, 0, 0].tolist() == [0, 1, 4, 5]
    assert halves.held_out.expert_ids_NLK[:, 0, 0].tolist() == [3]


def test_workloads_are_as_far_apart_as_written() -> None:
    loads = workloads(12, 4, 256)
    again = workloads(12, 4, 256)
    assert (loads.counts_SLE == again.counts_SLE).all()
    apart = distances(loads)[np.triu_indices(12, 1)]
    assert 0.01 < apart.min() < 0.05 and 0.12 < np.median(apart) < 0.2 and apart.max() < 0.3
    hottest = loads.shares_SLE().max(axis=2) * 256
    assert 4 < np.median(hottest) < 11
    assert average(loads).shares_SLE()[0] == pytest.approx(loads.shares_SLE().mean(axis=0))
    assert scenario(loads, 3).scenarios == (loads.scenarios[3],)
    assert len(without(loads, 3).scenarios) == 11
