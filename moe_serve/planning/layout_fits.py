"""Measures layouts of ranks on this machine, and fits their steps.

The ranks of one machine share its cores, and two cells share it again: each of them is also run
beside another one of its kind, as the time that this costs is not the sum of what processes do.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch

from moe_serve.config.cells import CellsConfig, CellShape, parse_cells
from moe_serve.errors import ConfigError, shortened
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.tensor_shard import check_shards
from moe_serve.pipeline.costs.cost_model import (
    AttentionCost,
    Experts,
    ShardedAttention,
    StageCosts,
)
from moe_serve.pipeline.costs.whole_step import LayoutStep, busiest
from moe_serve.planning.measure import Fit, fit
from moe_serve.planning.rank_steps import PairRates, RankSteps, started_cells, started_layout
from moe_serve.planning.whole_steps import StepSample, fit_whole_steps

Report = Callable[[str, Fit], None]

_SHARDS = (1, 2, 4)
_LEAST_PROCESSES, _PER_CORE = 16, 4  # that a layout may have
_SLOWER = 1.02  # beside another cell; less is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """The layouts to measure, and how long each loop takes. `has_pairs`: also two of each at
    once."""

    folder: Path
    device: str
    num_threads: int | None
    shapes: tuple[CellShape, ...]
    budget_s: float
    has_pairs: bool


def parse_layouts(text: str) -> tuple[CellShape, ...]:
    """Parses "1A1E, 2A2E tp2", as cells are written. Raises ConfigError."""
    shapes: list[CellShape] = []
    for each in text.split(","):
        try:
            (shape,) = parse_cells(f"({each.strip()})")
        except ConfigError:
            raise ConfigError(
                f"layouts cannot be {shortened(text)!r}: it takes layouts such as 1A1E, or 2A2E "
                "tp2 with two processes for each attention rank, separated by commas."
            ) from None
        if shape not in shapes:
            shapes.append(shape)
    return tuple(shapes)


def usual_layouts(spec: ModelSpec, device: torch.device, num_bytes: int) -> tuple[CellShape, ...]:
    """Returns the layouts that are measured if none are named: one attention rank of 1, 2 and 4
    processes, as far as the machine has cores and the model's heads divide.

    None on GPUs, which hold the model already, and none if two more copies of its `num_bytes` do
    not fit the free memory twice.
    """
    if device.type == "cuda" or psutil.virtual_memory().available < 4 * num_bytes:
        return ()
    return tuple(
        CellShape(attention_ranks=1, expert_ranks=1, attention_tp=count)
        for count in _SHARDS
        if count <= (os.cpu_count() or 1) and _can_shard(spec, count)
    )


def _can_shard(spec: ModelSpec, count: int) -> bool:
    try:
        check_shards(spec, count)
    except ConfigError:
        return False
    return True


def measure_layouts(
    request: LayoutRequest, costs: StageCosts, progress: Callable[[str], None], report: Report
) -> StageCosts:
    """Returns the costs with the steps of the layouts, and with the attention ranks of several
    processes that are in them. Raises ConfigError, CheckpointError and ClusterError."""
    for shape in request.shapes:
        progress(shape.ranks)
        with started_layout(request.folder, shape, request.device, request.num_threads) as started:
            found = started.measure(request.budget_s)
        share = found.cores / (os.cpu_count() or 1)
        if request.has_pairs:
            progress(f"two of {shape.ranks}")
            both = CellsConfig(layout=f"2x({shape.ranks})", hand_over="off")
            with started_cells(request.folder, both, request.device, request.num_threads) as cells:
                share = share_of([cells.pair_rates(request.budget_s)], share)
        costs = with_layout(costs, shape, found, share, report)
    return costs


def share_of(rates: Sequence[PairRates], busy: float) -> float:
    """Returns the share of the machine that makes two cells as slow as measured. `busy`: the share
    of the cores that one keeps busy, which counts if two do not slow each other down."""
    ratios = [
        2 * alone / both
        for each in rates
        for alone, both in zip(each.alone, each.both, strict=True)
    ]
    slower = statistics.median(ratios)
    return slower / 2 if slower > _SLOWER else min(0.5, busy)


def with_layout(
    costs: StageCosts, shape: CellShape, found: RankSteps, share: float, report: Report
) -> StageCosts:
    """Returns costs that also have the steps of a layout."""
    step, fitted = fit_layout(costs.experts, shape, found, share)
    report(f"steps of {step.name}", fitted)
    others = tuple(each for each in costs.layouts if each.name != step.name)
    costs = replace(costs, layouts=(*others, step))
    if shape.attention_tp == 1 or (shape.attention_ranks, shape.expert_ranks) != (1, 1):
        return costs
    cost, fitted = fit_sharded(costs, found)
    report(f"T_a attention, {shape.attention_tp} processes", fitted)
    kept = tuple(each for each in costs.sharded if each.num_shards != shape.attention_tp)
    sharded = ShardedAttention(num_shards=shape.attention_tp, attention=cost)
    return replace(costs, sharded=(*kept, sharded))


def fit_layout(
    experts: Experts, shape: CellShape, found: RankSteps, share: float
) -> tuple[LayoutStep, Fit]:
    """Fits whole steps of ranks."""
    samples = []
    for step in found.steps:
        most, total = busiest(step.loads), sum(load.num_rows for load in step.loads)
        samples.append(StepSample(most, step.seconds, total - most.num_rows))
    whole, fitted = fit_whole_steps(experts, samples)
    return (
        LayoutStep(
            attention_ranks=shape.attention_ranks,
            expert_ranks=shape.expert_ranks,
            attention_tp=shape.attention_tp,
            machine_share=share,
            whole=whole,
        ),
        fitted,
    )


def fit_sharded(costs: StageCosts, found: RankSteps) -> tuple[AttentionCost, Fit]:
    """Fits the mean layer of an attention rank of several processes: with the exchange of their
    parts, and without the messages to the experts."""
    num_layers = sum(layer.num_layers for layer in costs.layers)
    rows: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for step in found.steps:
        load = busiest(step.loads)
        own_s = step.attention_s - costs.handling_seconds(load)
        rows.append((step.num_micro_batches, load.num_rows, load.num_kv_tokens, load.num_pairs))
        seconds.append(max(own_s, 0.1 * step.attention_s, 1e-7) / num_layers)
    found_fit = fit(np.array(rows, dtype=np.float64), np.array(seconds), np.array(seconds))
    alpha_s, row_s, kv_token_s, pair_s = found_fit.coefficients
    cost = AttentionCost(alpha_s=alpha_s, row_s=row_s, kv_token_s=kv_token_s, pair_s=pair_s)
    return cost, found_fit


def check_num_processes(shapes: Sequence[CellShape]) -> None:
    """Raises ConfigError for a layout with far more processes than this machine has cores, whose
    steps would mostly measure how processes wait for each other."""
    num_cores = os.cpu_count() or 1
    most = max(_LEAST_PROCESSES, _PER_CORE * num_cores)
    for shape in shapes:
        if shape.num_processes > most:
            raise ConfigError(
                f"layouts has {shape.ranks}, which takes {shape.num_processes} processes, and this "
                f"machine has {num_cores} cores: use layouts of at most {most} processes."
            )


def check_layouts(shapes: Sequence[CellShape], device: torch.device, spec: ModelSpec) -> None:
    """Raises ConfigError for a layout over which the model cannot be spread, or for which this
    machine has too few GPUs."""
    num_experts = spec.router.num_experts
    for shape in shapes:
        if shape.expert_ranks > num_experts:
            raise ConfigError(
                f"layouts has {shape.ranks}, but the model has {num_experts} experts and each "
                f"expert rank needs one: use at most {num_experts} expert ranks."
            )
        try:
            check_shards(spec, shape.attention_tp)
        except ConfigError as error:
            raise ConfigError(f"layouts has {shape.ranks}: {error}") from None
        if device.type == "cuda" and shape.num_processes > torch.cuda.device_count():
            raise ConfigError(
                f"layouts has {shape.ranks}, which takes {shape.num_processes} GPUs, but this "
                f"machine has {torch.cuda.device_count()}: leave it out."
            )
