"""Ranks eight layouts of this machine by simulation, and by running them.

    python benchmarks/run.py layouts
    python benchmarks/run.py layouts --quick      # under load: fewer rounds

All layouts are started together and take turns: in each round every layout of one cell is
calibrated for some seconds, and every layout serves the same requests in a closed loop. The cells
of the last two layouts are not calibrated themselves: their steps are those of a single cell, and
how two of them slow each other down is measured on the replicas with other requests.

Prompts and answers are random, the demonstration model is served, and HTTP is not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scipy.stats import kendalltau

from harness.environment import write_report
from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Summary, summarize
from moe_serve.bench.simulated_cells import serve_cells
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.config.cells import CellsConfig, parse_cells
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.planning.calibration import CalibrationRequest, calibrate
from moe_serve.planning.calibration_file import Calibration
from moe_serve.planning.layout_fits import share_of, with_layout
from moe_serve.planning.measured_model import load_measured_model
from moe_serve.planning.rank_steps import (
    PairRates,
    RankSteps,
    StartedCells,
    StartedLayout,
    started_cells,
    started_layout,
)
from moe_serve.planning.whole_steps import StepSample, fit_whole_steps, whole_steps
from moe_serve.simulate.coordinated.coordinated_cell import costed_plans
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup, PageSpeed
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import CellSettings, calibrated, limits_of, make_cells
from moe_serve.simulate.world import World
from simulation.real_run import engine_in_process, serve

ONE, REPLICAS, ROLES = "one process", "2x(1A1E)", "1x(1A1E prefill) 1x(1A1E decode)"
SINGLE = ("1A1E", "1A2E", "2A1E", "2A2E", "1A1E tp2")
SCHEDULER = SchedulerConfig()
_TAU, _CHOICE = 0.8, 0.03


@dataclass(slots=True)
class Contender:
    """A layout that is started. `calibrate`: None for those that are made of other cells."""

    name: str
    engine: DrivenEngine
    calibrate: Callable[[], None] | None
    records: list[list[RequestRecord]] = field(default_factory=list)  # of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The measurements of the calibrations of all rounds."""

    whole: list[StepSample] = field(default_factory=list)
    ranks: dict[str, list[RankSteps]] = field(default_factory=dict)
    pairs: list[PairRates] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A layout's figures, measured and predicted."""

    layout: str
    tokens_per_s: float
    predicted: float
    tpot_ms: float
    predicted_tpot_ms: float

    @property
    def error(self) -> float:
        return self.predicted / self.tokens_per_s - 1


def contenders(options: argparse.Namespace, opened: ExitStack, samples: Samples) -> list[Contender]:
    """Starts all layouts."""
    model = load_measured_model(options.model, "cpu", 1)

    def whole() -> None:
        samples.whole.extend(whole_steps(model, options.calibrate_seconds))

    found = [Contender(ONE, engine_in_process(model, SCHEDULER), whole)]
    for name in SINGLE:
        (shape,) = parse_cells(f"({name})")
        ranks = opened.enter_context(started_layout(options.model, shape, "cpu", 1))
        found.append(Contender(name, ranks.engine, _calibrator(name, ranks, options, samples)))
    for name in (REPLICAS, ROLES):
        config = _cells_config(name)
        cells = opened.enter_context(started_cells(options.model, config, "cpu", 1))
        pairs = _pair_calibrator(cells, options, samples) if name == REPLICAS else None
        found.append(Contender(name, cells.engine, pairs))
    return found


def _cells_config(layout: str) -> CellsConfig:
    return CellsConfig(layout=layout, hand_over="always", min_tokens=64)


def _calibrator(
    name: str, ranks: StartedLayout, options: argparse.Namespace, samples: Samples
) -> Callable[[], None]:
    def run() -> None:
        samples.ranks.setdefault(name, []).append(ranks.measure(options.calibrate_seconds))

    return run


def _pair_calibrator(
    cells: StartedCells, options: argparse.Namespace, samples: Samples
) -> Callable[[], None]:
    return lambda: samples.pairs.append(cells.pair_rates(3 * options.calibrate_seconds))


def workload(options: argparse.Namespace, turn: int) -> list[Slot]:
    """Returns the requests of a round, the same for all layouts."""
    return list(
        Workload(
            seed=turn,
            concurrency=options.concurrency,
            prompt_tokens=Lengths(low=32, high=256),
            output_tokens=Lengths(low=32, high=96),
            num_requests=options.requests,
        ).slots()
    )


def calibration_of(base: Calibration, samples: Samples) -> Calibration:
    """Adds what was measured in all rounds to a calibration."""
    whole, _ = fit_whole_steps(base.costs.experts, samples.whole)
    costs = replace(base.costs, whole=whole)
    for name, found in samples.ranks.items():
        (shape,) = parse_cells(f"({name})")
        cores = statistics.mean(each.cores for each in found)
        steps = RankSteps(tuple(s for each in found for s in each.steps), cores)
        share = cores / (os.cpu_count() or 1)
        if name == "1A1E":
            share = share_of(samples.pairs, share)
        costs = with_layout(costs, shape, steps, share, lambda name, fitted: None)
    return replace(base, costs=costs)


def simulated(
    name: str, calibration: Calibration, slots: Sequence[Slot], options: argparse.Namespace
) -> list[RequestRecord]:
    """Simulates a round of a layout."""
    settings = CellSettings(
        layout=_layout(name), scheduler=SCHEDULER, has_prefix_cache=False, has_scatter=True
    )
    if name in (REPLICAS, ROLES):
        plans = costed_plans(
            parse_cells(name),
            lambda layout: calibrated(calibration, layout),
            lambda model, layout: limits_of(model, replace(settings, layout=layout)),
        )
        setup = CellsSetup(
            name=name,
            plans=tuple(plans),
            config=_cells_config(name),
            speed=PageSpeed.calibrated(calibration),
            shares_machine=True,
        )
        times = serve_cells(setup, jobs_of(slots, 0), options.concurrency).times
    else:
        cells = make_cells(calibrated(calibration, settings.layout), settings)
        times = World(cells).run(jobs_of(slots, 0), options.concurrency)
    return sorted(map(record_of, times), key=lambda record: record.index)


def _layout(name: str) -> Layout:
    if name == ONE:
        return Layout.parse("colocated", 1)
    shape = parse_cells(name if "(" in name else f"({name})")[0]
    devices = shape.num_processes
    return Layout.parse(
        f"{shape.attention_ranks}A{shape.expert_ranks}E", devices, shape.attention_tp
    )


def row_of(
    each: Contender, calibration: Calibration, rounds: Sequence[Sequence[Slot]],
    options: argparse.Namespace,
) -> Row:  # fmt: skip
    real = [summarize(records) for records in each.records]
    predicted = [summarize(simulated(each.name, calibration, s, options)) for s in rounds]

    def rate(found: Sequence[Summary]) -> float:
        return statistics.median(x.output_tok_s for x in found)

    def tpot(found: Sequence[Summary]) -> float:
        return statistics.median(x.tpot_ms.p50 for x in found if x.tpot_ms is not None)

    return Row(
        layout=each.name,
        tokens_per_s=rate(real),
        predicted=rate(predicted),
        tpot_ms=tpot(real),
        predicted_tpot_ms=tpot(predicted),
    )


def show(rows: Sequence[Row]) -> dict[str, float]:
    """Prints the rows and the aims."""
    print(f"{'layout':36}{'tokens/s':>10}{'predicted':>11}{'error':>7}"
          f"{'TPOT P50':>10}{'predicted':>11}{'error':>7}")  # fmt: skip
    for row in sorted(rows, key=lambda row: -row.tokens_per_s):
        print(
            f"{row.layout:36}{row.tokens_per_s:>10.0f}{row.predicted:>11.0f}{row.error:>+7.0%}"
            f"{row.tpot_ms:>10.2f}{row.predicted_tpot_ms:>11.2f}"
            f"{row.predicted_tpot_ms / row.tpot_ms - 1:>+7.0%}"
        )
    tau = float(kendalltau([r.tokens_per_s for r in rows], [r.predicted for r in rows]).statistic)
    chosen = max(rows, key=lambda row: row.predicted)
    loss = 1 - chosen.tokens_per_s / max(row.tokens_per_s for row in rows)
    error = statistics.median(abs(row.error) for row in rows)
    print(f"Kendall tau {tau:.2f} (aim {_TAU}): {'met' if tau >= _TAU else 'MISSED'}")
    print(f"chosen: {chosen.layout}, {loss:.1%} below the best measured (aim {_CHOICE:.0%}): "
          f"{'met' if loss <= _CHOICE else 'MISSED'}")  # fmt: skip
    print(f"median error of tokens/s {error:.1%}")
    return {"tau": tau, "loss": loss, "median_error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80, help="of each round")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--calibrate-seconds", type=float, default=0.4, help="of each loop")
    parser.add_argument("--quick", action="store_true", help="one round of few requests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.calibrate_seconds = 1, 32, 0.2
    began = time.monotonic()
    request = CalibrationRequest(
        folder=options.model, device="cpu", num_threads=1, is_quick=True, layouts=()
    )
    base, samples = calibrate(request, lambda what, share: None), Samples()
    rounds = [workload(options, turn) for turn in range(options.rounds)]
    with ExitStack() as opened:
        found = contenders(options, opened, samples)
        for turn, slots in enumerate(rounds):
            for each in found[turn:] + found[:turn]:
                if each.calibrate is not None:
                    each.calibrate()
                each.records.append(serve(each.engine, slots, options.concurrency))
    calibration = calibration_of(base, samples)
    rows = [row_of(each, calibration, rounds, options) for each in found]
    share = calibration.costs.layouts[0].machine_share
    print(f"a cell 1A1E takes {share:.2f} of the machine; {time.monotonic() - began:.0f} s in all")
    figures = show(rows)
    write_report(options.json, {"rows": [asdict(row) for row in rows], **figures})
    return 0
