"""Compares runs of a real server with simulations of the same runs.

    python benchmarks/run.py http_runs
    python benchmarks/run.py http_runs --only "short.*closed" --seconds 8

The client of `moe-serve bench` streams from a `moe-serve serve` in another process. What HTTP adds
is measured before the runs, and whole steps as in `own_runs`. With `--alone` the simulation is that
of the engine, which knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_serve.bench.bench_run import run_bench
from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.http_costs import measure_http, started_server
from moe_serve.bench.workload.workload import Workload
from moe_serve.pipeline.costs.cost_model import StageCosts
from moe_serve.planning.calibration import CalibrationRequest, calibrate
from moe_serve.planning.calibration_file import HttpCosts
from moe_serve.planning.measured_model import MeasuredModel, load_measured_model
from moe_serve.planning.whole_steps import StepSample
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.simulated_cell import SimulatedCell
from simulation.own_runs import Bench, Case, cases, compare_all, conclude, head

_LIMITS = "64/1024"  # those of a server


class HttpBench(Bench):
    """Serves over HTTP, and simulates servers, or with `http` None the engine alone."""

    def __init__(
        self, model: MeasuredModel, costs: StageCosts, http: HttpCosts | None, url: str
    ) -> None:
        super().__init__(model, costs, time.perf_counter)
        self._http, self._url, self._vocab_size = http, url, model.spec.vocab_size

    def real(
        self, case: Case, workload: Workload
    ) -> tuple[Sequence[RequestRecord], list[StepSample]]:
        plan = RunPlan(
            url=self._url,
            workload=_with_own_prompts(case, workload),
            endpoint=Endpoint(name="completions", model="", extra={"temperature": 1.0}),
            data="tokens",
            vocab_size=self._vocab_size,
        )
        report = asyncio.run(run_bench(plan))
        if report.summary.num_failed:
            raise SystemExit(f"{report.summary.num_failed} requests of {case.name} failed")
        return report.records, []

    def cell(self, case: Case, costs: StageCosts) -> SimulatedCell:
        if self._http is None:
            return super().cell(case, costs)
        cell = super().cell(case, costs.with_step_loss(self._http.step))
        return replace(cell, front=FrontEnd(self._http))


def _with_own_prompts(case: Case, workload: Workload) -> Workload:
    """Returns the workload with prompts that no other case has, so that none are cached."""
    return replace(workload, seed=zlib.crc32(case.name.encode()) // 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--most", type=int, help="run only so many cases")
    parser.add_argument("--only", default="", help="run the cases whose names match, as a pattern")
    parser.add_argument("--turns", type=int, default=8, help="in which HTTP is measured")
    parser.add_argument(
        "--alone", action="store_true", help="simulate the engine alone, to see what HTTP changes"
    )
    options = parser.parse_args()
    request = CalibrationRequest(folder=options.model, device="cpu", num_threads=1, is_quick=True)
    model = load_measured_model(options.model, "cpu", 1)
    costs = calibrate(request, lambda what, share: None).costs
    wanted = [
        each for each in cases() if each.limits == _LIMITS and re.search(options.only, each.name)
    ]
    if not wanted:
        parser.error(
            f"no run matches --only {options.only!r}: they are called 'long {_LIMITS} ...'"
        )
    http, _ = measure_http(model, options.turns)
    print(f"HTTP: {http}")
    head()
    with started_server(options.model, "cpu", 1) as url:
        bench = HttpBench(model, costs, None if options.alone else http, url)
        conclude(compare_all(bench, wanted[: options.most], options.seconds))
    return 0
