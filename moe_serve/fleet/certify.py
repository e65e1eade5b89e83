"""Simulates a fleet on the demand's requests, and states its figures."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.bench.figures.summary import Summary, summarize
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.config.cells import CellRole
from moe_serve.config.sections import SchedulerConfig
from moe_serve.fleet.demand import Demand
from moe_serve.fleet.packing import Fleet, Group
from moe_serve.simulate.balancer import ByPromptLength
from moe_serve.simulate.cell import Cell
from moe_serve.simulate.simulation import CellSettings, make_cells
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
    cells = [cell for group in fleet.groups for cell in _cells(group, demand)]
    balancer = ByPromptLength(
        [bucket.most_prompt for bucket in demand.buckets],
        list(zip(*(group.shares for group in fleet.groups), strict=True)),
        [group.num_cells for group in fleet.groups],
    )
    world = World(cells, balancer)
    times = world.run(jobs_of(demand.slots, demand.seed))
    records = sorted(map(record_of, times), key=lambda record: record.index)
    summary = summarize(records, slo=demand.slo, peak_in_flight=world.peak_in_flight)
    assert summary.goodput is not None, "a demand has limits"
    return Certified(fleet=fleet, summary=summary, meets=summary.goodput.share >= demand.attainment)


def _cells(group: Group, demand: Demand) -> list[Cell]:
    kind = group.kind
    layout = kind.layout
    settings = CellSettings(
        layout=layout,
        scheduler=SchedulerConfig(
            max_num_seqs=kind.max_num_seqs, max_batched_tokens=kind.max_batched_tokens
        ),
        max_model_len=min(kind.offer.size.max_context, demand.longest + 1),
        memory_bytes=kind.offer.memory_bytes,
        num_pages=kind.num_pages,
        micro_batches=kind.micro_batches,
    )
    return [cell for _ in range(group.num_cells) for cell in make_cells(kind.model, settings)]
