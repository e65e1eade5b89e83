"""The benchmark `kernels` runs on a CPU and all contestants agree. No timing is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from kernel_bench import kernels as kernels_benchmark
from kernel_bench.clock import Budget, Clock, DeviceLimits, bound
from kernel_bench.expert_contestants import BOUND, contestants
from kernel_bench.expert_work import least_bytes, make_rows, make_weights, operations
from kernel_bench.shapes import LAYERS
from moe_kernels.gpu.expert_layers import ExpertLayerSizes

CPU = torch.device("cpu")
TINY = next(layer for layer in LAYERS if layer.name == "tiny")


def test_it_runs_and_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "folder" / "kernels.json"
    command = [
        "kernels.py",
        "--smoke",
        "--device",
        "cpu",
        "--tokens",
        "1",
        "5",
        "--json",
        str(path),
    ]
    monkeypatch.setattr(sys, "argv", command)
    assert kernels_benchmark.main() == 0
    report = json.loads(path.read_text("utf-8"))
    works = [(row["work"], row["num_tokens"]) for row in report["results"]]
    assert works == [("experts", 1), ("experts", 5), ("attention", 3)], f"measured {works}"
    for row in report["results"]:
        assert row["bound"]["seconds"] > 0, f"{row['shape']} has no limit"
        for entry in row["measurements"]:
            assert not entry["failure"], f"{entry['contestant']} failed: {entry['failure']}"
            if row["work"] == "experts" and entry["contestant"] != BOUND:
                assert entry["error"] < 0.02, f"{entry['contestant']} computes something else"
    shown = capsys.readouterr().out
    assert "moe-serve torch" in shown and "grouped_mm" in shown, f"the table lacks them:\n{shown}"


def test_ranks_get_their_share_of_the_rows() -> None:
    shape = ExpertLayerSizes(
        name="x", num_experts=256, top_k=8, width=16, expert_width=16, num_ranks=32
    )  # fmt: skip
    assert (shape.num_local_experts, shape.num_choices) == (8, 1)
    assert [shape.num_rows(tokens) for tokens in (1, 4, 64)] == [1, 1, 16]


def test_what_the_work_costs_at_least() -> None:
    """By hand: 1 token, 2 of 8 experts of 3 x 64 x 96 weights; 2 operations for each weight."""
    rows = make_rows(TINY, 1, torch.bfloat16, CPU)
    assert rows.num_active == 2
    assert operations(TINY, rows) == 2 * 2 * 3 * 64 * 96
    assert least_bytes(TINY, rows, 2.0) == 2 * 3 * 64 * 96 * 2 + 64 * (2 + 4)


def test_the_slower_limit_bounds() -> None:
    limits = DeviceLimits(copy_gb_s=100.0, matrix_gflop_s=1000.0)
    assert bound(limits, 1e9, 1e9).set_by == "memory"
    assert bound(limits, 1e9, 1e9).seconds == pytest.approx(0.01)
    assert bound(limits, 1e9, 1e11).set_by == "compute"
    assert bound(limits, 1e9, 1e11).seconds == pytest.approx(0.1)


def test_a_clock_runs_as_often_as_it_may() -> None:
    runs: list[int] = []
    clock = Clock(CPU, Budget(min_runs=4, max_runs=4, seconds=0.0), flush_bytes=0)
    timing = clock.measure(lambda: runs.append(1))
    assert (timing.num_runs, timing.mode) == (4, "eager")
    assert len(runs) == 4 + 3, "three runs to warm up, four timed"


def test_routed_weights_of_every_shape_are_ordered() -> None:
    for shape in (
        TINY,
        ExpertLayerSizes(name="y", num_experts=4, top_k=4, width=8, expert_width=8),
    ):
        rows = make_rows(shape, 9, torch.float32, CPU)
        assert bool((rows.expert_ids_TK.diff(dim=-1) > 0).all()), "ids must ascend in a row"
        torch.testing.assert_close(rows.weights_TK.sum(-1), torch.ones(9))


def test_biases_reach_every_contestant() -> None:
    shape = ExpertLayerSizes(
        name="z", num_experts=4, top_k=2, width=32, expert_width=16, has_bias=True,
        activation=next(x for x in LAYERS if x.has_bias).activation,
    )  # fmt: skip
    weights, rows = make_weights(shape, torch.float32, CPU), make_rows(shape, 6, torch.float32, CPU)
    results = {c.name: c.make(weights)(rows) for c in contestants(CPU, torch.float32) if c.is_exact}
    first = next(iter(results.values()))
    for name, result in results.items():
        torch.testing.assert_close(result, first, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
