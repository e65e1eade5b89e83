"""Builds a simulation: the costs of a model, the memory of its devices, and the cells."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moe_serve import __version__
from moe_serve.config.sections import SchedulerConfig
from moe_serve.errors import ConfigError
from moe_serve.pipeline.costs.cost_model import StageCosts
from moe_serve.pipeline.costs.step_costs import Ranks, StepCosts
from moe_serve.planning.calibration_file import Calibration, HttpCosts
from moe_serve.simulate.costs.device import DeviceType
from moe_serve.simulate.costs.model_shape import ModelShape
from moe_serve.simulate.costs.roofline import RooflineCosts
from moe_serve.simulate.costs.routing_law import EvenRouting, RecordedRouting
from moe_serve.simulate.front_end import FrontEnd
from moe_serve.simulate.instant_ranks import WholeSeconds
from moe_serve.simulate.layout import Layout, ModelSize
from moe_serve.simulate.simulated_cell import CellLimits, SimulatedCell, is_one_engine, make_cell

MEMORY_SHARE = 0.9  # of a device, for weights and KV cache; the rest is for the runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """The settings that do not depend on the costs. `max_model_len` None: the model's context;
    `memory_bytes`: of one device (None: the device's own); `num_pages` None: what the memory
    holds."""

    layout: Layout
    scheduler: SchedulerConfig
    page_size: int = 16
    max_model_len: int | None = None
    memory_bytes: int | None = None
    num_pages: int | None = None
    has_prefix_cache: bool = True
    micro_batches: int | None = None
    has_scatter: bool = False  # step times vary as the calibration's did


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedModel:
    """A model with the costs of its steps in one cell of a layout. `scatter`: quantiles of measured
    over predicted times; empty: not known. `whole`: whole steps of the layout's ranks, if they were
    measured; then `machine_share` says how much of the machine a cell of them takes. `http`: None:
    clients use the engine itself."""

    size: ModelSize
    costs: StepCosts
    ranks: Ranks
    device_name: str
    device_bytes: int | None  # None: not known
    scatter: tuple[float, ...] = ()
    whole: WholeSeconds | None = None
    machine_share: float | None = None
    http: HttpCosts | None = None


def on_device(
    model: ModelShape,
    device: DeviceType,
    layout: Layout,
    routing: Path | None,
    *,
    expands_latents: bool = False,
) -> CostedModel:
    """Costs a model by published figures. `routing`: a trace of its choices; None: a formula;
    `expands_latents`: see `RooflineCosts`.

    Raises ConfigError, and the errors of reading a trace.
    """
    if layout.num_holders > model.num_experts:
        raise ConfigError(
            f"layout {layout.name} spreads experts over {layout.num_holders} devices, but "
            f"{model.size.name} has {model.num_experts} experts in a layer."
        )
    num_slots = model.num_experts + (layout.num_redundant or 0)
    if layout.num_redundant is not None and num_slots % layout.num_holders:
        raise ConfigError(
            f"redundant-experts is {layout.num_redundant}, but then {num_slots} experts of a layer "
            f"are spread over {layout.num_holders} devices: give a number with which they divide "
            "evenly."
        )
    law = (
        EvenRouting(model.num_experts, model.top_k)
        if routing is None
        else RecordedRouting.read(routing, model.num_experts, model.top_k)
    )
    return CostedModel(
        size=model.size,
        costs=RooflineCosts(model, device, layout, law, expands_latents=expands_latents),
        ranks=_ranks(layout),
        device_name=device.name,
        device_bytes=device.memory_bytes,
    )


def calibrated(
    calibration: Calibration,
    layout: Layout,
    *,
    shares_machine: bool = True,
    has_http: bool = False,
) -> CostedModel:
    """Costs a model by a calibration of this machine. Raises ConfigError if it is of another
    machine or version, or if the layout needs what it has not measured.

    `shares_machine`: the ranks of a cell run on one machine such as this, and if their steps were
    measured together, these count; else every rank has a device of its own. `has_http`: clients
    stream from a server, if HTTP was measured.
    """
    here = f"{platform.system()} {platform.machine()}"
    machine, model = calibration.machine, calibration.model
    if machine.moe_serve != __version__ or machine.host != here:
        raise ConfigError(
            f"the calibration is of moe-serve {machine.moe_serve} on {machine.host}, but this is "
            f"moe-serve {__version__} on {here}: run moe-serve calibrate here."
        )
    is_one, costs = is_one_engine(layout), calibration.costs
    http = calibration.http if has_http else None
    if http is not None:
        costs = costs.with_step_loss(http.step)
    step = None
    if shares_machine:
        step = costs.layout_step(layout.num_attention, layout.num_experts, layout.num_shards)
    if step is None:
        _check_covered(costs, layout)
    whole = costs.whole if step is None else step.whole
    return CostedModel(
        size=ModelSize(
            name=model.name,
            attention_bytes=model.attention_bytes,
            expert_bytes=model.expert_bytes,
            kv_token_bytes=model.kv_token_bytes,
            num_kv_parts=model.num_kv_parts,
            num_experts=costs.experts.num_experts,
            max_context=model.max_context,
        ),
        costs=costs if step is not None else costs.with_shards(layout.num_shards),
        ranks=_ranks(layout),
        device_name=machine.device,
        device_bytes=None,
        scatter=() if whole is None or not (is_one or step) else whole.scatter,
        whole=None if step is None else partial(costs.layout_seconds, step),
        machine_share=None if step is None else step.machine_share,
        http=http,
    )


def _check_covered(costs: StageCosts, layout: Layout) -> None:
    """Raises ConfigError if a calibration has no times of the stages of a layout."""
    if not layout.is_split and (layout.num_attention, layout.num_shards) != (1, 1):
        raise ConfigError(
            f"layout {layout.name} with {layout.num_shards} tensor shards cannot be simulated from "
            "a calibration, which has no times of experts spread over the attention devices: use "
            "replicas, or attention and expert ranks such as 1A2E."
        )
    if layout.num_shards not in costs.shard_counts:
        name = f"{layout.num_attention}A{layout.num_experts}E tp{layout.num_shards}"
        raise ConfigError(
            f"layout {layout.name} with {layout.num_shards} tensor shards is not in the "
            f'calibration: measure it with moe-serve calibrate --layouts "{name}", or all layouts '
            f'of so many shards with --layouts "1A1E tp{layout.num_shards}".'
        )


def make_cells(model: CostedModel, settings: CellSettings) -> list[SimulatedCell]:
    """Builds the cells of a layout. Raises ConfigError if the model does not fit its memory."""
    limits = limits_of(model, settings)
    cells = [
        make_cell(settings.layout, model.costs, model.ranks, limits, model.whole)
        for _ in range(settings.layout.num_cells)
    ]
    if model.http is None:
        return cells
    return [replace(cell, front=FrontEnd(model.http)) for cell in cells]


def limits_of(model: CostedModel, settings: CellSettings) -> CellLimits:
    """Returns the engines' limits, with as many pages as the memory holds. Raises ConfigError."""
    size, longest = model.size, settings.max_model_len or model.size.max_context
    if not 2 <= longest <= size.max_context:
        raise ConfigError(
            f"max-model-len must be 2 to {size.max_context} tokens for {size.name}, got {longest}."
        )
    return CellLimits(
        scheduler=settings.scheduler,
        num_pages=_num_pages(model, settings, longest),
        page_size=settings.page_size,
        max_model_len=longest,
        has_prefix_cache=settings.has_prefix_cache,
        micro_batches=settings.micro_batches,
        scatter=model.scatter if settings.has_scatter else (),
    )


def _num_pages(model: CostedModel, settings: CellSettings, longest: int) -> int:
    memory = settings.memory_bytes or model.device_bytes
    if memory is not None:
        usable = int(memory * MEMORY_SHARE)
        fitting = model.size.num_pages(settings.layout, usable, settings.page_size)
        if settings.num_pages is not None and settings.num_pages > fitting:
            raise ConfigError(
                f"num-pages is {settings.num_pages}, but the memory of a device beside its weights "
                f"holds {fitting} pages of {settings.page_size} tokens."
            )
        return settings.num_pages or fitting
    half = -(-settings.scheduler.max_num_seqs * longest // (2 * settings.page_size))
    return settings.num_pages or max(half, -(-longest // settings.page_size))


def _ranks(layout: Layout) -> Ranks:
    return Ranks(num_attention=layout.num_attention, num_experts=layout.num_holders)
