"""Simulates a fleet on the demand's requests, and states its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Slo, Summary, summarize
from moe_serve.bench.simulated_cells import serve_cells
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.config.cells import CellRole, CellsConfig, CellShape
from moe_serve.config.sections import SchedulerConfig
from moe_serve.fleet.cell_kinds import CellKind
from moe_serve.fleet.demand import Demand
from moe_serve.fleet.packing import Fleet, Group
from moe_serve.fleet.workers import Workers
from moe_serve.simulate.balancer import ByPromptLength
from moe_serve.simulate.coordinated.coordinated_cell import CellPlan
from moe_serve.simulate.coordinated.coordinated_run import CellsSetup
from moe_serve.simulate.simulated_cell import SimulatedCell
from moe_serve.simulate.simulation import CellSettings, limits_of, make_cells
from moe_serve.simulate.world import World

_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """A fleet and the figures of its simulation. `meets`: enough requests met the limits;
    `late_role`: with roles, the one whose limit was missed more often."""

    fleet: Fleet
    summary: Summary
    meets: bool
    late_role: CellRole | None = None

    @property
    def attainment(self) -> float:
        assert self.summary.goodput is not None, "a demand has limits"
        return self.summary.goodput.share

    @property
    def goodput(self) -> float:
        """Requests per second within the limits."""
        assert self.summary.goodput is not None, "a demand has limits"
        return self.summary.goodput.requests_per_s

    @property
    def device_hours(self) -> float:
        """Device hours of the simulated time."""
        return self.fleet.num_devices * self.summary.duration_s / 3600

    @property
    def output_cost(self) -> float:
        """Price of a million generated tokens, with the prompts that belong to them."""
        return self._cost(self.summary.output_tokens)

    @property
    def token_cost(self) -> float:
        """Price of a million tokens, of prompts and answers together."""
        return self._cost(self.summary.output_tokens + self.summary.prompt_tokens)

    def _cost(self, num_tokens: int) -> float:
        hours = self.summary.duration_s / 3600
        return self.fleet.price * hours / num_tokens * _MILLION if num_tokens else float("inf")


def certify(fleet: Fleet, demand: Demand) -> Certified:
    """Serves all requests of the demand with the real engines on a virtual clock."""
    jobs = jobs_of(demand.slots, demand.seed)
    if fleet.has_roles:
        served = serve_cells(_setup(fleet, demand), jobs)
        times, peak = served.times, served.peak_in_flight
    else:
        world = _world(fleet, demand)
        times = world.run(jobs)
        peak = world.peak_in_flight
    records = sorted(map(record_of, times), key=lambda record: record.index)
    summary = summarize(records, slo=demand.slo, peak_in_flight=peak)
    assert summary.goodput is not None, "a demand has limits"
    return Certified(
        fleet=fleet,
        summary=summary,
        meets=summary.goodput.share >= demand.attainment,
        late_role=_late_role(records, demand.slo) if fleet.has_roles else None,
    )


class Certifier:
    """Simulates fleets on a demand, each at most once."""

    def __init__(self, demand: Demand, workers: Workers) -> None:
        self.demand, self._workers = demand, workers

    @property
    def num_at_once(self) -> int:
        """The number of processes that simulate."""
        return self._workers.count

    def start(self, fleet: Fleet) -> None:
        """Simulates a fleet as soon as a process is free."""
        self._workers.start(_key(fleet), certify, fleet, self.demand)

    def result(self, fleet: Fleet) -> Certified:
        """Waits for the figures of a fleet that was started."""
        done: Certified = self._workers.result(_key(fleet))
        return replace(done, fleet=fleet)


def _key(fleet: Fleet) -> str:
    """Returns a text that differs between fleets of one demand, unlike their names."""
    return repr([(group.name, group.kind.headroom, group.shares) for group in fleet.groups])


def _late_role(records: Sequence[RequestRecord], slo: Slo) -> CellRole:
    """Returns the role whose limit more requests missed: that of the first token, or of the
    others."""
    first, later = replace(slo, tpot_s=None, e2e_s=None), replace(slo, ttft_s=None)
    num_first, num_later = (sum(not limit.is_met(r) for r in records) for limit in (first, later))
    return "prefill" if num_first >= num_later else "decode"


def _world(fleet: Fleet, demand: Demand) -> World:
    """Builds independent cells behind a balancer."""
    cells = [cell for group in fleet.groups for cell in _cells(group, demand)]
    balancer = ByPromptLength(
        [bucket.most_prompt for bucket in demand.buckets],
        list(zip(*(group.shares for group in fleet.groups), strict=True)),
        [group.num_cells for group in fleet.groups],
    )
    return World(cells, balancer)


def _setup(fleet: Fleet, demand: Demand) -> CellsSetup:
    """Describes cells with roles under one coordinator. Pages travel as the slowest offer's do."""
    plans = []
    for group in fleet.groups:
        kind = group.kind
        shape = CellShape(
            attention_ranks=kind.layout.num_attention,
            expert_ranks=kind.layout.num_experts,
            attention_tp=kind.layout.num_shards,
            role=kind.role,
        )
        limits = limits_of(kind.model, _settings(kind, demand))
        plans += [CellPlan(shape=shape, model=kind.model, limits=limits)] * group.num_cells
    speeds = [group.kind.offer.page_speed(fleet.num_devices) for group in fleet.groups]
    return CellsSetup(
        name=fleet.name,
        plans=tuple(plans),
        config=CellsConfig(),
        speed=min(speeds, key=lambda speed: speed.device_bytes_per_s),
    )


def _cells(group: Group, demand: Demand) -> list[SimulatedCell]:
    settings = _settings(group.kind, demand)
    return [cell for _ in range(group.num_cells) for cell in make_cells(group.kind.model, settings)]


def _settings(kind: CellKind, demand: Demand) -> CellSettings:
    return CellSettings(
        layout=kind.layout,
        scheduler=SchedulerConfig(
            max_num_seqs=kind.max_num_seqs, max_batched_tokens=kind.max_batched_tokens
        ),
        max_model_len=min(kind.offer.size.max_context, demand.longest + 1),
        memory_bytes=kind.offer.memory_bytes,
        num_pages=kind.num_pages,
        micro_batches=kind.micro_batches,
    )
