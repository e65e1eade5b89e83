"""Runs a workload on the simulator, and reports on it as on a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_serve import __version__
from moe_serve.bench.client.load_client import ClientHealth
from moe_serve.bench.client.server_metrics import ServerSide
from moe_serve.bench.figures.cells_figures import CellsFigures
from moe_serve.bench.figures.request_record import RequestRecord, RunTimeline
from moe_serve.bench.figures.summary import Samples, Slo, quantiles_ms, summarize
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.bench.report.report import Report
from moe_serve.bench.simulated_cells import Scaling, serve_cells
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.bench.workload.workload import Workload
from moe_serve.engine.request.stats import EngineCounts, EngineStats
from moe_serve.errors import BenchError
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.simulation import CellSettings, CostedModel, make_cells
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest
from moe_serve.simulate.world import World

NOT_MODELLED = (
    "a simulation: HTTP, the tokenizer, drafted tokens, lost ranks and slow moments of a machine "
    "are not modelled, and the queue has no limit."
)
NO_REQUESTS = "the workload has no requests: give --requests, or a longer --duration."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A workload and the model that serves it."""

    model: CostedModel
    settings: CellSettings
    workload: Workload
    slo: Slo | None = None
    timeline: SimulatedTimeline | None = None
    is_strict: bool = False  # requests are refused if their targets cannot be met
    cells: CellsSetup | None = None  # cells under one coordinator, in place of the layout
    scaling: Scaling | None = None  # of these cells

    @property
    def layout_name(self) -> str:
        return self.settings.layout.name if self.cells is None else self.cells.name

    @property
    def num_devices(self) -> int:
        return self.settings.layout.num_devices if self.cells is None else self.cells.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """The results of a run. `cells` is None without a coordinator of cells."""

    times: list[RequestTimes]
    peak_in_flight: int
    stats: list[EngineStats]
    num_repeated: int = 0
    cells: CellsFigures | None = None


def run_simulation(run: SimulatedRun) -> Report:
    """Simulates a run. The same run gives the same report. Raises BenchError and ConfigError."""
    slots = list(run.workload.slots())
    longest = run.settings.max_model_len or run.model.size.max_context
    _check(slots, longest)
    jobs = jobs_of(slots, run.workload.seed, run.workload.tiers, is_strict=run.is_strict)
    served = _served(run, jobs) if run.cells is None else _served_cells(run, run.cells, jobs)
    if run.timeline is not None:
        run.timeline.append_requests(served.times)
    return _report(run, [record_of(each) for each in served.times], served)


def _served(run: SimulatedRun, jobs: Iterator[SimulatedRequest]) -> _Served:
    cells = make_cells(run.model, run.settings)
    world = World(cells, timeline=run.timeline)
    times = world.run(jobs, run.workload.concurrency)
    for cell in cells:
        cell.engine.check_integrity()
    return _Served(
        times=times,
        peak_in_flight=world.peak_in_flight,
        stats=[cell.engine.stats() for cell in cells],
        num_repeated=world.num_repeated,
    )


def _served_cells(
    run: SimulatedRun, setup: CellsSetup, jobs: Iterator[SimulatedRequest]
) -> _Served:
    done = serve_cells(
        setup, jobs, run.workload.concurrency, scaling=run.scaling, timeline=run.timeline
    )
    return _Served(
        times=done.times,
        peak_in_flight=done.peak_in_flight,
        stats=done.stats,
        cells=done.figures,
    )


def _check(slots: Sequence[Slot], longest: int) -> None:
    if not slots:
        raise BenchError(NO_REQUESTS)
    for slot in slots:
        if slot.prompt is not None:
            raise BenchError(
                f"request {slot.index + 1} has a text, which a simulation cannot count in tokens: "
                "give a trace with lengths."
            )
        if slot.prompt_tokens + slot.output_tokens > longest:
            raise BenchError(
                f"request {slot.index + 1} has {slot.prompt_tokens} + {slot.output_tokens} tokens, "
                f"but the context is {longest}: cut with --max-prompt and --max-output, or raise "
                "--max-model-len."
            )


def _report(run: SimulatedRun, records: list[RequestRecord], served: _Served) -> Report:
    records.sort(key=lambda record: record.index)
    summary = summarize(records, slo=run.slo, peak_in_flight=served.peak_in_flight)
    samples = Samples.of(records)
    tiers, seconds = run.workload.tiers, summary.duration_s
    return Report(
        url=f"simulation of {run.num_devices} x {run.model.device_name}, {run.layout_name}",
        model=run.model.size.name,
        created="simulated",
        moe_serve_version=__version__,
        workload=_workload_json(run),
        client={"machine": "simulated"},
        summary=summary,
        health=ClientHealth(cpu=0.0, loop_lag=None, lateness=None),
        timeline=RunTimeline.of(records, summary.duration_s),
        quantiles_ms={
            "ttft": quantiles_ms(samples.ttft_R),
            "tpot": quantiles_ms(samples.tpot_R),
            "itl": quantiles_ms(samples.itl_G),
            "e2e": quantiles_ms(samples.e2e_R),
        },
        server=_server(served.stats, served.num_repeated),
        notes=[NOT_MODELLED],
        records=tuple(records),
        service=None
        if tiers is None
        else ServiceFigures.of(records, tiers.tiers, seconds, is_strict=run.is_strict),
        cells=served.cells,
    )


def _server(cells: Sequence[EngineStats], num_repeated: int) -> ServerSide:
    """Returns the figures of all cells. Cells step apart from each other, so their steps add up,
    and those that were run together with another."""
    counts = sum((cell.counts for cell in cells), EngineCounts())
    num_tokens = counts.num_prompt_tokens + counts.num_generated_tokens
    num_steps, queried = sum(cell.num_steps for cell in cells), counts.num_queried_tokens
    num_steps += num_repeated
    by_micro_batches = Counter[int]()
    for cell in cells:
        for step in () if cell.pools is None else cell.pools.steps:
            by_micro_batches[step.micro_batches] += step.num_steps
    service = next((cell.service for cell in cells if cell.service is not None), None)
    tiers = () if service is None else service.tiers  # all cells share one policy
    return ServerSide(
        num_steps=float(num_steps),
        tokens_per_step=num_tokens / max(1, num_steps),
        prefix_hit_rate=counts.num_hit_tokens / queried if queried else None,
        num_preemptions=float(counts.num_preemptions),
        experts_needed_per_step=None,
        expert_hit_rate=None,
        predicted_experts_per_step=None,
        placement_switches=None,
        steps_by_micro_batches={str(k): float(v) for k, v in sorted(by_micro_batches.items())},
        runaways={tier.tier: float(tier.num_runaways) for tier in tiers if tier.num_runaways},
    )


def _workload_json(run: SimulatedRun) -> dict[str, object]:
    settings = run.settings
    return {
        **run.workload.facts(),
        "data": "tokens",
        "endpoint": "simulation",
        "is_stream": True,
        "ignore_eos": True,
        "body": {},
        "timeout_s": None,
        "layout": run.layout_name,
        "devices": run.num_devices,
        "tensor_shards": settings.layout.num_shards,
    }
