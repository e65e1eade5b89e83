"""Builds a simulated cell: the engine that a server would run, on a clock and costs of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import StepExecutor
from moe_serve.engine.schedule.policy.arrival_order import BALANCED, FIFO
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.errors import ConfigError
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES, MicroBatchChooser
from moe_serve.pipeline.costs.step_costs import Ranks, StepCosts
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.instant_executor import InstantExecutor, Scatter
from moe_serve.simulate.instant_ranks import InstantCoordinator, StepPlace, WholeSeconds
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.virtual_clock import VirtualClock

SIMULATED_POLICIES = {"fifo": FIFO, "balanced": BALANCED}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLimits:
    """The settings of every simulated engine. `micro_batches` None: chosen in each step from the
    costs, as a server with a calibration does; `num_pages`: of one attention rank; `scatter`: see
    `InstantExecutor`."""

    scheduler: SchedulerConfig
    num_pages: int
    page_size: int
    max_model_len: int
    has_prefix_cache: bool = True
    micro_batches: int | None = None
    scatter: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.scheduler.batch_policy not in SIMULATED_POLICIES:
            raise ConfigError(
                f"the batch policy {self.scheduler.batch_policy!r} is not simulated, as it needs "
                f"predictions of a model's choices: use {' or '.join(SIMULATED_POLICIES)}."
            )
        if self.num_pages * self.page_size < self.max_model_len:
            raise ConfigError(
                f"the KV cache of an attention rank has {self.num_pages} pages of "
                f"{self.page_size} tokens, too small for one request of {self.max_model_len} "
                "tokens: use more devices or tensor shards, or shorter requests."
            )


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """One engine and its clock. Engines of different cells step independently. `executor`: that of
    an engine of one device, whose decode steps can be run several at once; `front`: the HTTP side
    of its server; None: clients use the engine."""

    engine: DrivenEngine
    clock: VirtualClock
    page_size: int
    executor: InstantExecutor | None = None
    front: FrontEnd | None = None


def make_cell(
    layout: Layout,
    costs: StepCosts,
    ranks: Ranks,
    limits: CellLimits,
    whole: WholeSeconds | None = None,
) -> SimulatedCell:
    """Builds a cell. `costs` and `ranks` are those of one cell of the layout; `whole`: see
    `InstantCoordinator`.

    A single attention rank with the experts on its own devices is one engine, as in one process.
    Otherwise the cell is a cluster's engine over ranks.
    """
    clock = VirtualClock()
    if not is_one_engine(layout):
        cluster, _ = make_cluster(layout, costs, ranks, limits, clock, whole=whole)
        return SimulatedCell(cluster, clock, limits.page_size)
    executor = InstantExecutor(clock, costs, limits.scatter)
    engine = _engine(executor, itertools.count(), limits, clock)
    return SimulatedCell(engine, clock, limits.page_size, executor)


def is_one_engine(layout: Layout) -> bool:
    """Returns True if a cell has one attention rank, with the experts on its own devices."""
    return not layout.is_split and layout.num_attention == 1


def make_cluster(
    layout: Layout,
    costs: StepCosts,
    ranks: Ranks,
    limits: CellLimits,
    clock: VirtualClock,
    ids: itertools.count[int] | None = None,
    *,
    whole: WholeSeconds | None = None,
    place: StepPlace | None = None,
    policy: ServicePolicy | None = None,
) -> tuple[ClusterEngine, InstantCoordinator]:
    """Builds a cluster's engine over ranks that compute nothing. `ids`: numbers of sequences;
    `whole`, `place`: see `InstantCoordinator`; `policy`: for service tiers of several cells."""
    service = ServiceState.of(limits.scheduler, clock, policy=policy)

    def make_engine(executor: RemoteExecutor, ids: itertools.count[int]) -> Engine:
        return _engine(executor, ids, limits, clock, service)

    if is_one_engine(layout):
        whole = _colocated(costs)
    watch = _watch(costs, ranks, limits) if whole is None else PoolWatch(None, 1, None)
    if not layout.is_split:
        ranks = replace(ranks, num_experts=1)  # one report on the experts of all devices
    scatter = None if whole is None else Scatter(limits.scatter)
    coordinator = InstantCoordinator(
        clock, costs, ranks, watch, whole=whole, scatter=scatter, place=place
    )
    cluster = ClusterEngine(
        coordinator, make_engine, watch, lambda: None, is_ahead=True, service=service, ids=ids
    )
    return cluster, coordinator


def _colocated(costs: StepCosts) -> WholeSeconds:
    return lambda loads: costs.colocated_time(loads[0])


def _watch(costs: StepCosts, ranks: Ranks, limits: CellLimits) -> PoolWatch:
    if limits.micro_batches is not None:
        return PoolWatch(None, limits.micro_batches, None)
    return PoolWatch(MicroBatchChooser(costs, ranks), MAX_MICRO_BATCHES, None)


def _engine(
    executor: StepExecutor,
    ids: itertools.count[int],
    limits: CellLimits,
    clock: VirtualClock,
    service: ServiceState | None = None,
) -> Engine:
    return Engine(
        executor,
        scheduler=limits.scheduler,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        micro_batches=1,
        max_model_len=limits.max_model_len,
        eos_token_ids=frozenset(),
        has_prefix_cache=limits.has_prefix_cache,
        ids=ids,
        policy=SIMULATED_POLICIES[limits.scheduler.batch_policy],
        clock=clock,
        service=service,
    )
