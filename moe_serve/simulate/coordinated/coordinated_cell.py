"""Builds the cells of a coordinator: unlike shapes and roles on one virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.config.cells import CellShape
from moe_serve.engine.engine import Engine
from moe_serve.engine.service.service_policy import ServicePolicy
from moe_serve.simulate.instant_ranks import InstantCoordinator, StepPlace
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulated_cell import CellLimits, make_cluster
from moe_serve.simulate.simulation import CostedModel
from moe_serve.simulate.step_ends import StepEnds
from moe_serve.simulate.virtual_clock import VirtualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """One cell to build: its shape, what steps cost in it, and the limits of its engines."""

    shape: CellShape
    model: CostedModel
    limits: CellLimits

    @property
    def layout(self) -> Layout:
        return layout_of(self.shape)


@dataclass(slots=True)
class CoordinatedCell:
    """A cell as a coordinator has it. Its step runs while it is out."""

    index: int
    shape: CellShape
    engine: ClusterEngine
    ranks: InstantCoordinator
    num_devices: int
    num_seats: int
    is_out: bool = False
    is_live: bool = True
    _is_draining: bool = False

    @property
    def is_draining(self) -> bool:
        """True if it gets no new requests, and its running ones move away."""
        return self._is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._is_draining, service = value, self.engine.service
        if service is not None:  # forecasts count only on cells that take requests
            service.admission.set_open(service.number, is_open=not value)

    @property
    def rank_engines(self) -> Mapping[str, Engine]:
        return self.engine.rank_engines

    def lacks(self, adapter: int) -> bool:
        """Returns False: there are no adapters."""
        return False

    def place_of(self, rank: str) -> RankPlace:
        """Returns the process of an attention rank."""
        return RankPlace(self.index, rank, self.engine.start_of(rank))


def layout_of(shape: CellShape) -> Layout:
    """Returns the layout of one cell of a shape."""
    return Layout(
        name=str(shape),
        num_cells=1,
        num_attention=shape.attention_ranks,
        num_experts=shape.expert_ranks,
        num_shards=shape.attention_tp,
    )


def make_coordinated(
    plans: Sequence[CellPlan],
    clock: VirtualClock,
    ids: itertools.count[int],
    ends: StepEnds,
    policy: ServicePolicy | None = None,
) -> list[CoordinatedCell]:
    """Builds cells that share a clock and sequence numbers. `ends`: the ends of their steps;
    `policy`: that of their service tiers."""
    cells = []
    for index, plan in enumerate(plans):
        layout = plan.layout
        engine, ranks = make_cluster(
            layout,
            plan.model.costs,
            plan.model.ranks,
            plan.limits,
            clock,
            ids,
            whole=plan.model.whole,
            place=StepPlace(ends, index),
            policy=policy,
        )
        cells.append(
            CoordinatedCell(
                index=index,
                shape=plan.shape,
                engine=engine,
                ranks=ranks,
                num_devices=layout.num_cell_devices,
                num_seats=plan.limits.scheduler.max_num_seqs * layout.num_attention,
            )
        )
    return cells


def costed_plans(
    shapes: Sequence[CellShape],
    costed: Callable[[Layout], CostedModel],
    limits: Callable[[CostedModel, Layout], CellLimits],
) -> list[CellPlan]:
    """Returns a plan of each cell; equal shapes are costed once."""
    models = {shape: costed(layout_of(shape)) for shape in dict.fromkeys(shapes)}
    return [
        CellPlan(shape=s, model=models[s], limits=limits(models[s], layout_of(s))) for s in shapes
    ]
