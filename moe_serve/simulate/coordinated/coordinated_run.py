"""Builds a world of cells under one coordinator: the server's own router and hand-overs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from moe_serve.cluster.autoscale.autoscaler import Autoscaler
from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import ClusterConfig, SchedulerConfig
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.planning.calibration_file import Calibration
from moe_serve.simulate.coordinated.cells_world import CellsWorld
from moe_serve.simulate.coordinated.coordinated_cell import (
    CellPlan,
    CoordinatedCell,
    make_coordinated,
)
from moe_serve.simulate.coordinated.instant_carrier import InstantCarrier, PageLinks
from moe_serve.simulate.coordinated.scaled_cells import ScaledCells, ScaleTimes
from moe_serve.simulate.costs.device import DeviceType
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.simulated_timeline import SimulatedTimeline
from moe_serve.simulate.step_ends import OwnMachines, SharedMachine, StepEnds
from moe_serve.simulate.virtual_clock import VirtualClock

_TIMEOUT_S = ClusterConfig().timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpeed:
    """The speed of KV pages between cells. `device_bytes_per_s`: of one device, one way."""

    device_bytes_per_s: float
    latency_s: float

    @classmethod
    def of_device(cls, device: DeviceType, num_devices: int) -> PageSpeed:
        """Returns the speed within a node, if all devices are in one, else of the network."""
        return cls(
            device_bytes_per_s=device.link_bytes_per_s(num_devices <= device.node_devices),
            latency_s=device.link_latency_us * 1e-6,
        )

    @classmethod
    def calibrated(cls, calibration: Calibration) -> PageSpeed:
        """Returns the speed of messages between ranks of one host, as measured: a rank writes
        them, they travel, and a rank reads them. The measured time of a rank is for both."""
        link = calibration.costs.link
        byte_s = (link.attention.beta_s + link.experts.beta_s) / 2 + link.transfer.beta_s
        latency_s = (link.attention.alpha_s + link.experts.alpha_s) / 2 + link.transfer.alpha_s
        return cls(device_bytes_per_s=1 / max(byte_s, 1e-12), latency_s=latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsSetup:
    """Cells, how requests move between them, and the links on which their pages travel. `name`: as
    in `--cells`; `shares_machine`: all cells run on one machine, and slow each other down as far as
    that was measured."""

    name: str
    plans: tuple[CellPlan, ...]
    config: CellsConfig
    speed: PageSpeed
    shares_machine: bool = False

    @property
    def num_devices(self) -> int:
        return sum(plan.layout.num_cell_devices for plan in self.plans)

    def with_scheduler(self, scheduler: SchedulerConfig) -> CellsSetup:
        """Returns these cells with another scheduler."""
        limits = [replace(plan.limits, scheduler=scheduler) for plan in self.plans]
        plans = [replace(p, limits=own) for p, own in zip(self.plans, limits, strict=True)]
        return replace(self, plans=tuple(plans))


@dataclass(frozen=True, slots=True)
class BuiltCells:
    """A world and its parts. `scaled`: None if the number of cells never changes."""

    world: CellsWorld
    cells: list[CoordinatedCell]
    moves: CellMoves
    carrier: InstantCarrier
    clock: VirtualClock
    scaled: ScaledCells | None


def build_cells(
    setup: CellsSetup,
    *,
    autoscaler: Autoscaler | None = None,
    times: ScaleTimes | None = None,
    timeline: SimulatedTimeline | None = None,
) -> BuiltCells:
    """Builds the cells and what moves requests between them. `autoscaler`: starts and ends cells,
    at the given times."""
    clock, ids = VirtualClock(), itertools.count()
    policy = ServicePolicy.of(setup.plans[0].limits.scheduler, clock)
    cells = make_coordinated(setup.plans, clock, ids, step_ends(setup), policy)

    def step_end(cell: int) -> float:
        return cells[cell].ranks.last_end or clock.now

    carrier = InstantCarrier(page_links(setup), clock, step_end)
    chunk = max(plan.limits.scheduler.max_batched_tokens for plan in setup.plans)
    moves = CellMoves(
        cells,
        carrier,
        setup.config,
        clock,
        timeout_s=_TIMEOUT_S,
        chunk_tokens=chunk,
        policy=policy,
    )
    scaled = None
    if autoscaler is not None:
        scaled = ScaledCells(cells, autoscaler, clock, times or ScaleTimes())
    admission = None if policy is None else policy.admission
    http = setup.plans[0].model.http
    world = CellsWorld(
        cells,
        moves,
        carrier,
        clock,
        ids,
        admission=admission,
        watcher=scaled,
        timeline=timeline,
        front=None if http is None else FrontEnd(http),
    )
    return BuiltCells(world, cells, moves, carrier, clock, scaled)


def step_ends(setup: CellsSetup) -> StepEnds:
    """Returns what says when the steps of the cells end."""
    shares = {i: plan.model.machine_share for i, plan in enumerate(setup.plans)}
    if not setup.shares_machine or None in shares.values():
        return OwnMachines()
    return SharedMachine({i: share for i, share in shares.items() if share is not None})


def page_links(setup: CellsSetup) -> PageLinks:
    """Returns the links between the attention ranks. Shards of a rank that each hold a part of a
    page send together; where all hold the same, one does."""
    first = setup.plans[0]
    size = first.model.size
    shards = [min(plan.shape.attention_tp, size.num_kv_parts) for plan in setup.plans]
    return PageLinks(
        bytes_per_s=[setup.speed.device_bytes_per_s * count for count in shards],
        latency_s=setup.speed.latency_s,
        page_bytes=size.kv_token_bytes * first.limits.page_size,
        parcel_bytes=setup.config.parcel_bytes,
        memory_bytes=setup.config.memory_bytes,
    )
