"""Measuring what HTTP adds to an engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_serve.bench import http_costs
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.http_costs import can_measure_http, chunk_seconds, measure_http, started_server
from moe_serve.errors import BenchServerError
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.planning.measured_model import load_measured_model
from tests.support.cluster.calibrations import cpu_calibration


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stream(first_s: float, num: int = 4, step_s: float = 0.1) -> RequestRecord:
    last_s = first_s + (num - 1) * step_s
    return RequestRecord(
        index=0, scheduled_s=0.0, started_s=0.0, end_s=last_s, first_s=first_s, last_s=last_s,
        gaps_s=array("d", [step_s] * (num - 1)), wanted_tokens=num, output_tokens=num,
    )  # fmt: skip


def test_time_between_chunks_is_that_of_streams_which_began_together() -> None:
    together = [stream(1.0 + 0.002 * place) for place in range(5)]
    early = [stream(0.9), stream(0.902)]
    assert chunk_seconds([*early, *together]) == pytest.approx(0.002)
    assert chunk_seconds([stream(1.0)]) is None
    assert chunk_seconds([stream(1.0), stream(1.2)]) is None, "they never share a first step"


@pytest.mark.usefixtures("_threads_as_before")
def test_a_real_server_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_costs, "_STREAMS", (1, 3))
    monkeypatch.setattr(http_costs, "_OUTPUT", 6)
    monkeypatch.setattr(http_costs, "_LONGEST", 32)
    model = load_measured_model(demo_model_folder(), "cpu", 1)
    costs, report = measure_http(model, 1)
    assert costs.request.seconds(16) >= 0 and costs.begin_s >= 0 and costs.chunk_s >= 0
    assert min(costs.step.alpha_s, costs.step.beta_s) >= 0
    assert report.name == http_costs.HTTP_STEPS and report.num_samples == 2


def test_large_models_and_gpus_are_measured_on_demand_only() -> None:
    small = cpu_calibration()
    here = replace(small, machine=replace(small.machine, device="cpu"))
    assert can_measure_http(here) and not can_measure_http(small), "made up is not the CPU"
    large = replace(here.model, expert_bytes=2**50)
    assert not can_measure_http(replace(here, model=large))


def test_a_server_that_cannot_start_is_reported() -> None:
    options = ("--num-pages", "0")
    with (
        pytest.raises(BenchServerError, match="did not start.*num_pages"),
        started_server(demo_model_folder(), "cpu", 1, options),
    ):
        pass
