"""Runs a workload on the simulator, and reports on it as on a server."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from moe_serve import __version__
from moe_serve.bench.client.load_client import ClientHealth
from moe_serve.bench.client.server_metrics import ServerSide
from moe_serve.bench.figures.request_record import REFUSED, RequestRecord, RunTimeline
from moe_serve.bench.figures.summary import Samples, Slo, quantiles_ms, summarize
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.bench.report.report import Report
from moe_serve.bench.workload.prompt_maker import PromptMaker, Slot
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.bench.workload.workload import Workload
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.service_terms import NO_SERVICE, Service, Targets
from moe_serve.engine.request.stats import EngineCounts, EngineStats
from moe_serve.errors import BenchError
from moe_serve.simulate.cell import Cell
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.simulation import CellSettings, CostedModel, make_cells
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest
from moe_serve.simulate.world import World

NOT_MODELLED = (
    "a simulation: HTTP, the tokenizer, drafted tokens, lost ranks and slow moments of a machine "
    "are not modelled, and the queue has no limit."
)
_VOCABULARY = 2**31 - 1  # so that prompts share nothing by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A workload and the model that serves it."""

    model: CostedModel
    settings: CellSettings
    workload: Workload
    slo: Slo | None = None
    timeline: SimulatedTimeline | None = None
    is_strict: bool = False  # requests are refused if their targets cannot be met


def run_simulation(run: SimulatedRun) -> Report:
    """Simulates a run. The same run gives the same report. Raises BenchError and ConfigError."""
    slots = list(run.workload.slots())
    longest = run.settings.max_model_len or run.model.size.max_context
    _check(slots, longest)
    cells = make_cells(run.model, run.settings)
    world = World(cells, timeline=run.timeline)
    jobs = jobs_of(slots, run.workload.seed, run.workload.tiers, is_strict=run.is_strict)
    times = world.run(jobs, run.workload.concurrency)
    if run.timeline is not None:
        run.timeline.append_requests(times)
    for cell in cells:
        cell.engine.check_integrity()
    return _report(run, [record_of(each) for each in times], world, cells)


def _check(slots: Sequence[Slot], longest: int) -> None:
    if not slots:
        raise BenchError("the workload has no requests: give --requests, or a longer --duration.")
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


def jobs_of(
    slots: Sequence[Slot], seed: int, tiers: TierMix | None = None, *, is_strict: bool = False
) -> Iterator[SimulatedRequest]:
    """Yields the requests of a workload for the simulator. `is_strict`: all requests of tiers with
    a target are."""
    maker = PromptMaker(kind="tokens", seed=seed, vocab_size=_VOCABULARY)
    for slot in slots:
        yield SimulatedRequest(
            index=slot.index,
            at_s=slot.at_s,
            num_output=slot.output_tokens,
            make_prompt=partial(_token_ids, maker, slot),
            service=_service(slot, tiers, is_strict),
            priority=0 if tiers is None else tiers.priority_of(slot.tier),
            session=slot.session,
        )


def _service(slot: Slot, tiers: TierMix | None, is_strict: bool) -> Service:
    if tiers is None:
        return Service(tenant=slot.tenant) if slot.tenant else NO_SERVICE
    return service_of(tiers.named(slot.tier), slot.tenant, is_strict=is_strict)


def service_of(tier: TierConfig, tenant: str, *, is_strict: bool) -> Service:
    """Returns what a tier entitles a request of a tenant to."""
    return Service(
        tier=tier.name,
        weight=tier.weight,
        targets=Targets(
            ttft_s=tier.ttft_s, tpot_s=tier.tpot_s, e2e_s=tier.e2e_s, is_strict=is_strict
        ),
        is_sheddable=tier.is_sheddable,
        tenant=tenant,
    )


def _token_ids(maker: PromptMaker, slot: Slot) -> list[int]:
    ids = maker.prompt(slot)
    assert isinstance(ids, list), "random token ids"
    return [int(each) for each in ids if isinstance(each, int)]


def record_of(times: RequestTimes) -> RequestRecord:
    """Returns a simulated request as `bench` records one."""
    at = times.token_times
    gaps = array("d", [later - earlier for earlier, later in zip(at, at[1:], strict=False)])
    return RequestRecord(
        index=times.index,
        scheduled_s=times.due_s,
        started_s=times.due_s,
        end_s=times.end_s,
        first_s=at[0] if at else None,
        last_s=at[-1] if at else None,
        gaps_s=gaps,
        wanted_tokens=times.num_output,
        prompt_tokens=times.num_prompt,
        output_tokens=len(at),
        cached_tokens=times.num_cached,
        error=None if times.error is None else REFUSED if times.is_refused else "engine",
        detail=times.error or "",
        tier=times.service.tier,
        tenant=times.service.tenant,
        session=times.session,
        predicted_ttft_s=times.predicted_ttft_s,
    )


def _report(
    run: SimulatedRun, records: list[RequestRecord], world: World, cells: Sequence[Cell]
) -> Report:
    records.sort(key=lambda record: record.index)
    summary = summarize(records, slo=run.slo, peak_in_flight=world.peak_in_flight)
    samples, layout = Samples.of(records), run.settings.layout
    tiers, seconds = run.workload.tiers, summary.duration_s
    return Report(
        url=f"simulation of {layout.num_devices} x {run.model.device_name}, {layout.name}",
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
        server=_server([cell.engine.stats() for cell in cells], world.num_repeated),
        notes=[NOT_MODELLED],
        records=tuple(records),
        service=None
        if tiers is None
        else ServiceFigures.of(records, tiers.tiers, seconds, is_strict=run.is_strict),
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
        "layout": settings.layout.name,
        "devices": settings.layout.num_devices,
        "tensor_shards": settings.layout.num_shards,
    }
