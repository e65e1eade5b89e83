"""A calibration of the demonstration model: all values are measured, none is negative, and a
plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cli.calibrate import us
from moe_serve.cli.main import main
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.pipeline.costs.cost_model import AttentionCost, Experts
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.pipeline.costs.whole_step import WholeStep
from moe_serve.planning import calibration as calibration_module
from moe_serve.planning.calibration_file import read_calibration, write_calibration
from moe_serve.planning.measure import (
    AttentionSample,
    ExpertSample,
    fit,
    fit_attention,
    fit_experts,
    random_choices,
)
from moe_serve.planning.measured_model import MeasuredModel, load_measured_model
from moe_serve.planning.natural_steps import natural_rows
from moe_serve.planning.plan_memory import weight_bytes
from moe_serve.planning.whole_steps import StepSample, fit_whole_steps
from tests.support.cluster.calibrations import cpu_calibration


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    assert exit_info.value.code is None or isinstance(exit_info.value.code, int)
    return exit_info.value.code or 0


@pytest.fixture
def _threads_as_before() -> object:
    before = torch.get_num_threads()
    yield None
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.timeout(400)
def test_calibrate_then_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether the times are good is not asked here: a few steps of each kind will do.
    monkeypatch.setattr(calibration_module, "_QUICK_MIXED_S", 0.02)
    path = tmp_path / "calibration.json"
    layouts = ("--layouts", "1A1E tp2")
    assert run("calibrate", "--quick", "--num-threads", "1", "--out", str(path), *layouts) == 0
    printed = capsys.readouterr().out
    assert "T_a attention" in printed and "T_c transfer, gloo" in printed and str(path) in printed
    calibration = read_calibration(path)
    costs, model = calibration.costs, calibration.model
    assert (model.name, model.num_layers, model.kv_token_bytes) == ("demo_model", 6, 3072)
    assert costs.experts.num_experts == 32 and costs.experts.num_effective > 16
    alone = costs.colocated_time(BatchLoad.decode(1, 64))
    assert 0 < alone < costs.colocated_time(BatchLoad.decode(64, 64))
    assert costs.shard_counts == (1, 2) and [x.name for x in costs.layouts] == ["1A1E tp2"]
    assert costs.layouts[0].whole.seconds(BatchLoad.decode(8, 64), 16.0) > 0
    assert costs.link.attention.seconds(64) > 0 and calibration.network.attention.alpha_s > 0
    assert {fit.name for fit in calibration.fits} >= {
        "T_e experts",
        "exchange, attention rank",
        "sampling",
        "whole steps",
        "steps of 1A1E tp2",
        "T_a attention, 2 processes",
    }

    plan = ("plan", "--calibration", str(path), "--devices", "3", "--batch", "16")
    assert run(*plan) == 0
    assert "disaggregation" in capsys.readouterr().out
    assert run(*plan, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["layouts"]) == 3 + 2 * 4 + 4  # 2A1E, 1A2E, and 1A1E tp2
    assert document["verdict"]["sentence"] and document["request"]["batch"] == 16


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, two = str(tmp_path / "here.json"), ("--devices", "2")
    write_calibration(cpu_calibration(), Path(written))
    for arguments, message in (
        (["calibrate", "--device", "tpu"], "device must be one of"),
        (["calibrate", "--out", str(tmp_path / "no" / "x.json")], "no is not a folder"),
        (["calibrate", "--layouts", "tp2"], "layouts cannot be 'tp2'"),
        (["calibrate", "--out", str(tmp_path)], "cannot be written: it is a folder"),
        (["calibrate", str(tmp_path / "missing")], "is not a folder: give a local checkpoint"),
        (["plan", "--calibration", written, *two, "--memory-bytes", "80GB"], "such as 80GiB"),
        (["plan", "--calibration", "missing.json", "--devices", "2"], "cannot read the calibr"),
    ):
        assert run(*arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_times_are_printed_without_exponents() -> None:
    seconds = (0.0, 1.4448e-10, 4.8678e-06, 0.00010931, 0.0034957, 1.5)
    assert [us(each) for each in seconds] == [
        "0 \u00b5s",
        "0.000144 \u00b5s",
        "4.87 \u00b5s",
        "109 \u00b5s",
        "3,496 \u00b5s",
        "1,500,000 \u00b5s",
    ]


def test_a_layout_that_cannot_be_used_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    write_calibration(cpu_calibration(), path)
    plan = ("plan", "--calibration", str(path), "--devices", "2", "--context", "512")
    assert run(*plan, "--memory-bytes", "1KiB") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" 2 repl")]
    assert len(rows) == 1 and "for 1 sequence" in rows[0] and "0.00  " not in rows[0], rows
    assert run(*plan, "--memory-bytes", "2GiB", "--json") == 0
    assert json.loads(capsys.readouterr().out)["request"]["memory_bytes"] == 2**31


@pytest.fixture(scope="module")
def model() -> MeasuredModel:
    return load_measured_model(demo_model_folder(), "cpu", 1)


def test_weights_are_counted_as_the_file_has_them(model: MeasuredModel) -> None:
    counted = weight_bytes(demo_model_folder(), model.spec, model.dtype.itemsize)
    file_bytes = (demo_model_folder() / "model.safetensors").stat().st_size
    assert counted.attention + counted.experts == pytest.approx(file_bytes, rel=0.01)


def test_natural_rows_are_the_true_routers_and_random_ones_are_not(model: MeasuredModel) -> None:
    rows = natural_rows(model, num_sequences=4, num_steps=3)
    assert sorted(rows) == list(range(6))
    ids = rows[0].expert_ids_TK
    assert ids.shape == (12, 4) and bool((ids.diff(dim=1) > 0).all())
    drawn = random_choices(rows, 32, seed=0)[0].expert_ids_TK
    assert drawn.shape == ids.shape and bool((drawn.diff(dim=1) > 0).all())
    assert not torch.equal(drawn, ids)


def test_the_knee_is_found() -> None:
    true = AttentionCost(
        alpha_s=1e-5, row_s=1e-6, kv_token_s=1e-8, pair_s=1e-9, spill_s=3e-8, spill_tokens=8192
    )
    loads = [BatchLoad.decode(n, c) for n in (1, 4, 16, 64, 128) for c in (64, 512, 2048)]
    loads += [
        BatchLoad(num_rows=n, num_sequences=1, num_kv_tokens=n, num_pairs=n * n, num_largest=n)
        for n in (32, 512)
    ]
    cost, found = fit_attention([AttentionSample(load, true.seconds(load)) for load in loads])
    assert cost.spill_tokens == 8192 and found.max_error < 1e-6, (cost, found)
    assert cost.spill_s == pytest.approx(3e-8, rel=1e-3)


def test_whole_steps_are_fitted_and_their_scatter_kept() -> None:
    """The fit finds the coefficients of steps that follow the law, without a step that other
    programs slowed."""
    true = WholeStep(
        alpha_s=1e-3, row_s=1e-4, kv_token_s=5e-7, pair_s=1e-7, expert_s=2e-5, sequence_s=2e-4
    )
    experts = Experts(num_experts=32, top_k=4, num_effective=28.0)
    loads = [BatchLoad.decode(n, c) for n in (1, 2, 4, 8, 16, 32, 64) for c in (32, 128, 512)]
    loads += [BatchLoad.of_parts([0], [n]) for n in (8, 32, 128, 512, 1024)]
    loads += [BatchLoad.of_parts([0] + [300] * 7, [n] + [1] * 7) for n in (8, 64, 256, 900)]
    samples = [
        StepSample(x, true.seconds(x, experts.num_activated(x.num_rows)) * (5 if i == 7 else 1))
        for i, x in enumerate(loads)
    ]
    found, fitted = fit_whole_steps(experts, samples)
    assert fitted.max_error < 1e-6 and found.scatter == pytest.approx((1.0,) * 33, abs=1e-6)
    for load in loads:
        activated = experts.num_activated(load.num_rows)
        assert found.seconds(load, activated) == pytest.approx(true.seconds(load, activated))
    costs = replace(cpu_calibration().costs, whole=found)
    assert costs.colocated_time(loads[0]) == pytest.approx(
        true.seconds(loads[0], costs.experts.num_activated(1))
    )


def test_steps_that_scatter_are_predicted_by_their_mean() -> None:
    """One step of a row in three takes 1.6 times as long, those of many rows are steady. Neither a
    fit of relative errors nor one without the slowest tenth would predict the mean."""
    experts = Experts(num_experts=32, top_k=4, num_effective=32.0)
    one, many = BatchLoad.decode(1, 50), BatchLoad.decode(32, 50)
    samples = [StepSample(one, 1e-3 * (1.6 if i % 3 == 0 else 1.0)) for i in range(90)]
    samples += [StepSample(many, 9e-3)] * 20
    found, _ = fit_whole_steps(experts, samples)
    assert found.seconds(one, experts.num_activated(1)) == pytest.approx(1.2e-3, rel=1e-3)
    assert found.seconds(many, experts.num_activated(32)) == pytest.approx(9e-3, rel=1e-3)


def test_a_router_with_favourites_has_fewer_effective_experts() -> None:
    def sample(num_rows: int, num_activated: float) -> ExpertSample:
        return ExpertSample(num_rows, 4 * num_rows, num_activated, True, 1.0)

    def activated(n: float, rows: int) -> float:
        return n * (1 - (1 - 4 / n) ** rows)

    samples = [sample(rows, activated(20.0, rows)) for rows in (1, 4, 16, 64)]
    assert fit_experts(32, 4, samples).num_effective == pytest.approx(20.0, rel=0.01)


@given(coefficients=st.lists(st.floats(0.01, 10), min_size=3, max_size=3))
def test_finds_a_linear_law(coefficients: list[float]) -> None:
    x = np.array([1.0, 2, 4, 8, 16, 32])
    columns = np.column_stack([np.ones(6), x, np.sqrt(x)])
    found = fit(columns, columns @ coefficients)
    assert found.coefficients == pytest.approx(coefficients, rel=1e-3, abs=1e-6)
    assert found.r_squared == pytest.approx(1.0)
    assert found.max_error < 1e-6


def test_no_coefficient_is_negative() -> None:
    """The exact line through these has a negative slope."""
    found = fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0]))
    assert min(found.coefficients) == 0.0
    assert found.coefficients[0] > 0


def test_small_measurements_count_as_much_as_large_ones() -> None:
    columns = np.array([[1.0], [1000.0]])
    found = fit(columns, np.array([1.0, 2000.0]))
    assert abs(found.errors[0]) == pytest.approx(abs(found.errors[1]), rel=0.6)
    assert found.median_error <= found.max_error
