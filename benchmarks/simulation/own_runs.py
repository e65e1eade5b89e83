"""Compares runs of the real engine on this machine with simulations of the same runs.

    python benchmarks/run.py own_runs
    python benchmarks/run.py own_runs --only "long.*open" --seconds 8     # four of the runs
    python benchmarks/run.py own_runs --cpu-time --seconds 1     # rough, on a busy machine

The runs go through one engine in this process; `http_runs` has those over HTTP. Whole steps are
calibrated before, between and after the runs. A run is simulated with the calibrations before and
after it, and does not count if these differ by more than 5%.

Two more figures of a run separate errors of the costs from those of the queue. `same steps`
compares the measured and the predicted seconds of the steps that were really run. `+5%` is the
change of the simulated median TPOT if all steps were 5% longer: in an open loop, requests then stay
longer, more of them share a step, and the steps become longer still.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.bench.capacity import steady_rate
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Spread, Summary, summarize
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.workload.workload import GammaArrivals, Lengths, Workload
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.pipeline.costs.cost_model import StageCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks
from moe_serve.planning.calibration import CalibrationRequest, calibrate
from moe_serve.planning.measured_model import MeasuredModel, load_measured_model
from moe_serve.planning.whole_steps import StepSample, fit_whole_steps, whole_steps
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulated_cell import CellLimits, SimulatedCell, make_cell
from moe_serve.simulate.world import World
from simulation.real_run import run_for_real

LENGTHS = {"short": ((16, 64), (16, 48)), "long": ((128, 512), (32, 96))}
LIMITS = {"64/1024": (64, 1024), "16/256": (16, 256)}  # requests / tokens of a step
CLOSED, OPEN = (1, 4, 16, 32), (0.5, 0.8)  # requests at once; shares of the capacity
_DRIFT, _EVERY = 0.05, 2  # runs between calibrations
_QUEUE = 200  # requests that wait at once where the capacity is simulated
_LONGER = 1.05
_TIMES = ("alpha_s", "row_s", "kv_token_s", "pair_s", "expert_s", "sequence_s")
_TYPICAL = (BatchLoad.decode(1, 200), BatchLoad.decode(16, 200), BatchLoad.of_parts([0], [400]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. Exactly one of `concurrency` and `share` (of the capacity) is given."""

    lengths: str
    limits: str
    concurrency: int | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        load = f"closed {self.concurrency}" if self.share is None else f"open {self.share:g}"
        return f"{self.lengths:6}{self.limits:9}{load}"

    @property
    def scheduler(self) -> SchedulerConfig:
        most, rows = LIMITS[self.limits]
        return SchedulerConfig(max_num_seqs=most, max_batched_tokens=rows)

    def workload(self, num: int, rate: float | None = None) -> Workload:
        (low, high), (short, long) = LENGTHS[self.lengths]
        return Workload(
            seed=len(self.name),
            concurrency=self.concurrency if rate is None else None,
            arrivals=None if rate is None else GammaArrivals(rate=rate),
            prompt_tokens=Lengths(low=low, high=high),
            output_tokens=Lengths(low=short, high=long),
            num_requests=num,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The figures of a run and of its simulation. `drift`: of the calibrations around it;
    `same_steps`: error of the costs for the steps that were really run, None if they are not known;
    `if_longer`: change of the
    simulated median TPOT with steps that are 5% longer."""

    case: Case
    real: Summary
    simulated: Summary
    drift: float
    same_steps: float | None
    if_longer: float

    def errors(self) -> dict[str, float]:
        real, simulated = figures(self.real), figures(self.simulated)
        return {name: simulated[name] / real[name] - 1 for name in real}

    def late_steps(self, percentile: str) -> float:
        """Returns the difference of a TTFT in steps, that is, in median TPOTs."""
        a, b, step = self.real.ttft_ms, self.simulated.ttft_ms, self.real.tpot_ms
        assert a is not None and b is not None and step is not None, "all runs have tokens"
        return abs(float(getattr(a, percentile) - getattr(b, percentile))) / step.p50


def figures(summary: Summary) -> dict[str, float]:
    def of(spread: Spread | None, name: str) -> float:
        assert spread is not None, "all runs have tokens"
        return float(getattr(spread, name))

    return {
        "tokens/s": summary.output_tok_s,
        "TPOT P50": of(summary.tpot_ms, "p50"),
        "TPOT P99": of(summary.tpot_ms, "p99"),
        "E2E P50": of(summary.e2e_ms, "p50"),
        "TTFT P50": of(summary.ttft_ms, "p50"),
        "TTFT P99": of(summary.ttft_ms, "p99"),
    }


def cases() -> Iterator[Case]:
    for lengths in LENGTHS:
        for limits in LIMITS:
            for concurrency in CLOSED:
                yield Case(lengths=lengths, limits=limits, concurrency=concurrency)
            for share in OPEN:
                yield Case(lengths=lengths, limits=limits, share=share)


class Bench:
    """The model, and the costs as last calibrated."""

    def __init__(self, model: MeasuredModel, costs: StageCosts, clock: Clock) -> None:
        self._model, self._costs, self._clock = model, costs, clock

    def calibrate(self, budget_s: float) -> list[StepSample]:
        return whole_steps(self._model, budget_s, self._clock)

    def costs(self, samples: Sequence[StepSample]) -> StageCosts:
        whole, _ = fit_whole_steps(self._costs.experts, samples)
        return replace(self._costs, whole=whole)

    def real(
        self, case: Case, workload: Workload
    ) -> tuple[Sequence[RequestRecord], list[StepSample]]:
        """Serves a workload. The steps are empty if they are not known."""
        slots = list(workload.slots())
        return run_for_real(self._model, slots, case.concurrency, case.scheduler, self._clock)

    def cell(self, case: Case, costs: StageCosts) -> SimulatedCell:
        assert costs.whole is not None, "these costs were calibrated"
        limits = CellLimits(
            scheduler=case.scheduler,
            num_pages=self._model.cache.num_pages,
            page_size=self._model.cache.page_size,
            max_model_len=self._model.max_context,
            has_prefix_cache=False,
            scatter=costs.whole.scatter,
        )
        return make_cell(
            Layout.parse("colocated", 1), costs, Ranks(num_attention=1, num_experts=1), limits
        )

    def simulated(self, case: Case, workload: Workload, costs: StageCosts) -> Summary:
        jobs = jobs_of(list(workload.slots()), 0)
        times = World([self.cell(case, costs)]).run(jobs, workload.concurrency)
        return summarize(sorted(map(record_of, times), key=lambda record: record.index))

    def sized(self, case: Case, costs: StageCosts, seconds: float) -> Workload:
        """Returns a workload that takes about `seconds`."""
        if case.share is None:
            rate = self.simulated(case, case.workload(100), costs).requests_per_s
            return case.workload(max(8, 2 * (case.concurrency or 1), round(rate * seconds)))
        rate = case.share * self.capacity(case, costs)
        return case.workload(max(20, round(rate * seconds)), rate)

    def capacity(self, case: Case, costs: StageCosts) -> float:
        """Returns the requests per second at which a queue that never ends is worked off."""
        slots = [replace(slot, at_s=0.0) for slot in case.workload(_QUEUE, 1.0).slots()]
        times = World([self.cell(case, costs)]).run(jobs_of(slots, 0))
        return steady_rate([record_of(each) for each in times])


def slower(costs: StageCosts, factor: float) -> StageCosts:
    """Returns costs with whole steps that take `factor` times as long."""
    whole = costs.whole
    assert whole is not None, "these costs were calibrated"
    times = {name: factor * getattr(whole, name) for name in _TIMES}
    few_rows_s = tuple(factor * each for each in whole.few_rows_s)
    return replace(costs, whole=replace(whole, few_rows_s=few_rows_s, **times))


def drift_between(a: StageCosts, b: StageCosts) -> float:
    ratios = [b.colocated_time(load) / a.colocated_time(load) for load in _TYPICAL]
    return max(abs(ratio - 1) for ratio in ratios)


def compare_all(bench: Bench, wanted: Sequence[Case], seconds: float) -> list[Compared]:
    """Runs a few cases between two calibrations, and simulates them with both together."""
    found: list[Compared] = []
    before = bench.calibrate(seconds / 4)
    for first in range(0, len(wanted), _EVERY):
        costs = bench.costs(before)
        part = [
            (case, bench.sized(case, costs, seconds)) for case in wanted[first : first + _EVERY]
        ]
        real = [bench.real(case, workload) for case, workload in part]
        after = bench.calibrate(seconds / 4)
        both, drift = bench.costs([*before, *after]), drift_between(costs, bench.costs(after))
        for (case, workload), (records, steps) in zip(part, real, strict=True):
            simulated = bench.simulated(case, workload, both)
            longer = bench.simulated(case, workload, slower(both, _LONGER))
            found.append(
                Compared(
                    case=case,
                    real=summarize(records),
                    simulated=simulated,
                    drift=drift,
                    same_steps=_same_steps(both, steps),
                    if_longer=figures(longer)["TPOT P50"] / figures(simulated)["TPOT P50"] - 1,
                )
            )
            show(found[-1])
        before = after
    return found


def _same_steps(costs: StageCosts, steps: Sequence[StepSample]) -> float | None:
    seconds = sum(each.seconds for each in steps)
    if not seconds:
        return None
    return sum(costs.colocated_time(each.load) for each in steps) / seconds - 1


def show(each: Compared) -> None:
    cells = [
        f"{value:9.1f}{each.errors()[name]:>+6.0%}" for name, value in figures(each.real).items()
    ]
    drift = f"  drift {each.drift:.0%}" if each.drift > _DRIFT else ""
    same = "" if each.same_steps is None else f"{each.same_steps:+.0%}"
    causes = f"{same:>12}{each.if_longer:>+6.0%}"
    print(f"{each.case.name:26}{''.join(cells)}{causes}{drift}", flush=True)


def conclude(found: Sequence[Compared]) -> None:
    steady = [each for each in found if each.drift <= _DRIFT]
    for what, runs in (("all runs", found), ("steady runs", steady)):
        print(f"{what}: {len(runs)}")
        for name in figures(found[0].real) if runs else ():
            errors = [abs(each.errors()[name]) for each in runs]
            print(f"  {name:10} median {statistics.median(errors):6.1%}  worst {max(errors):6.1%}")
        errors = [abs(each.same_steps) for each in runs if each.same_steps is not None]
        if errors:
            print(f"  same steps median {statistics.median(errors):6.1%}  worst {max(errors):6.1%}")
        for percentile in ("p50", "p99"):
            missed = [
                each
                for each in runs
                if abs(each.errors()[f"TTFT {percentile.upper()}"]) > 0.15
                and each.late_steps(percentile) > 2
            ]
            print(f"  TTFT {percentile.upper()} off by more than 15% and 2 steps: {len(missed)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--most", type=int, help="run only so many cases")
    parser.add_argument("--only", default="", help="run the cases whose names match, as a pattern")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time, for busy machines: rough"
    )
    arguments = parser.parse_args()
    request = CalibrationRequest(folder=arguments.model, device="cpu", num_threads=1, is_quick=True)
    model = load_measured_model(arguments.model, "cpu", 1)
    costs = calibrate(request, lambda what, share: None).costs
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    head()
    wanted = [each for each in cases() if re.search(arguments.only, each.name)][: arguments.most]
    if not wanted:
        parser.error(
            f"no run matches --only {arguments.only!r}: they are called 'long 64/1024 ...'"
        )
    conclude(compare_all(Bench(model, costs, clock), wanted, arguments.seconds))
    return 0


def head() -> None:
    """Prints the first line of the table."""
    names = "".join(f"{name:>15}" for name in ("tokens/s", "TPOT P50", "TPOT P99", "E2E P50",
                                               "TTFT P50", "TTFT P99"))  # fmt: skip
    print(f"{'run (measured, error)':26}{names}{'same steps':>12}{'+5%':>6}")
