"""Measures a model's stages on this machine, and fits the cost model to them."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from moe_serve import __version__
from moe_serve.cache.page_key import model_identity
from moe_serve.config.cells import CellShape
from moe_serve.errors import ConfigError
from moe_serve.model.hub.hub_name import folder_model_name
from moe_serve.pipeline.costs.cost_model import (
    AttentionCost,
    ExpertCost,
    Experts,
    LayerCosts,
    Line,
    LinkCosts,
    StageCosts,
)
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.pipeline.transport import LocalTransport
from moe_serve.planning.calibration_file import (
    SCHEMA,
    CalibratedModel,
    Calibration,
    FitReport,
    MachineFacts,
)
from moe_serve.planning.exchange_timing import (
    EXCHANGES,
    QUICK_EXCHANGES,
    ExchangeSample,
    ExchangeSetup,
    time_exchanges,
)
from moe_serve.planning.layout_fits import (
    LayoutRequest,
    check_layouts,
    check_num_processes,
    measure_layouts,
    usual_layouts,
)
from moe_serve.planning.measure import (
    QUICK_ROWS,
    ROWS,
    AttentionSample,
    ExpertSample,
    Fit,
    Stopwatch,
    attention_cases,
    first_rows,
    fit,
    fit_attention,
    fit_experts,
    random_choices,
    time_attention,
    time_experts,
)
from moe_serve.planning.measured_model import LayerKind, MeasuredModel, load_measured_model
from moe_serve.planning.natural_steps import (
    DecodeSample,
    decode_steps,
    natural_rows,
)
from moe_serve.planning.plan_memory import weight_bytes
from moe_serve.planning.whole_steps import fit_whole_steps, whole_steps

Progress = Callable[[str, float], None]  # (name of the measurement, share done)

_BATCHES = (1, 4, 16, 64)  # sequences in a whole step
_NATURAL_SEQUENCES, _NATURAL_STEPS = 64, 8
_ATTENTION_BUDGET_S, _EXPERTS_BUDGET_S = 40.0, 20.0
_LEAST_CASES = 8
_MIXED_S, _QUICK_MIXED_S = 1.5, 0.4  # for each number of requests in progress
_NO_LINE = Line(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """The model and device to measure. `is_quick`: fewer points, a quarter of the time; `layouts`:
    whose ranks are started and measured (None: the usual ones, or none if it is quick)."""

    folder: Path
    device: str = "auto"
    num_threads: int | None = None
    is_quick: bool = False
    layouts: tuple[CellShape, ...] | None = None


def calibrate(request: CalibrationRequest, progress: Progress) -> Calibration:
    """Takes under two minutes on a model that fits the machine with room to spare, and about half a
    minute for each layout.

    Raises CheckpointError and ConfigError as loading does, ConfigError if no second process can be
    reached, and ClusterError if the ranks of a layout cannot start.
    """
    clock = time.monotonic()
    check_num_processes(request.layouts or ())
    progress("loading", 0.0)
    model = load_measured_model(request.folder, request.device, request.num_threads)
    shapes = request.layouts
    if shapes is None:
        weights = weight_bytes(model.folder, model.spec, model.dtype.itemsize)
        num_bytes = weights.attention + weights.experts
        usual = usual_layouts(model.spec, model.device, num_bytes)
        shapes = () if request.is_quick else usual
    check_layouts(shapes, model.device, model.spec)
    stopwatch = Stopwatch(model.device, 0.03 if request.is_quick else 0.12)
    fits: list[FitReport] = []
    experts, expert_cost = _measure_experts(model, request.is_quick, stopwatch, progress, fits)
    layers = tuple(
        LayerCosts(
            num_layers=len(kind.layers),
            attention=_measure_attention(model, kind, request.is_quick, stopwatch, progress, fits),
            experts=expert_cost if kind.is_sparse else None,
        )
        for kind in model.kinds
    )
    progress("transfers", 0.8)
    link = _measure_link(model, request.is_quick, True, fits)
    network = _measure_link(model, request.is_quick, False, fits)
    progress("steps", 0.9)
    layer_costs = StageCosts(
        layers=layers,
        experts=experts,
        row_bytes=model.spec.width * model.dtype.itemsize,
        width=model.spec.width,
        link=link,
        fixed=_NO_LINE,
        sampling=_NO_LINE,
    )
    costs = _measure_fixed(model, layer_costs, request.is_quick, fits)
    progress("whole steps", 0.95)
    samples = whole_steps(model, _QUICK_MIXED_S if request.is_quick else _MIXED_S)
    whole, found = fit_whole_steps(experts, samples)
    fits.append(_report("whole steps", found))
    costs = replace(costs, whole=whole)
    costs = _measure_layouts(request, shapes, costs, progress, fits)
    progress("done", 1.0)
    return Calibration(
        schema=SCHEMA,
        model=_model_facts(model),
        machine=_machine_facts(model),
        costs=costs,
        network=network,
        fits=tuple(fits),
        seconds=time.monotonic() - clock,
    )


def _measure_layouts(
    request: CalibrationRequest,
    shapes: tuple[CellShape, ...],
    costs: StageCosts,
    progress: Progress,
    fits: list[FitReport],
) -> StageCosts:
    """Adds the measurements of real ranks."""
    return measure_layouts(
        LayoutRequest(
            folder=request.folder,
            device=request.device,
            num_threads=request.num_threads,
            shapes=shapes,
            budget_s=_QUICK_MIXED_S if request.is_quick else _MIXED_S,
            has_pairs=not request.is_quick,
        ),
        costs,
        lambda what: progress(what, 0.97),
        lambda name, found: fits.append(_report(name, found)),
    )


def _measure_experts(
    model: MeasuredModel,
    is_quick: bool,
    stopwatch: Stopwatch,
    progress: Progress,
    fits: list[FitReport],
) -> tuple[Experts, ExpertCost]:
    """Measures the mean of the sparse layers, which differ in weights only."""
    progress("router", 0.1)
    layers = [index for kind in model.kinds if kind.is_sparse for index in kind.measured]
    if not layers:
        raise ConfigError(
            f"{model.folder} has no routed experts in any layer, so it has no layout to calibrate."
        )
    num_sequences = min(_NATURAL_SEQUENCES, model.cache.num_pages // 2)
    rows = natural_rows(model, num_sequences, _NATURAL_STEPS)
    rows = {layer: rows[layer] for layer in layers}
    samples: list[ExpertSample] = []
    deadline = time.monotonic() + _EXPERTS_BUDGET_S
    router = model.spec.router
    for index, count in enumerate(QUICK_ROWS if is_quick else ROWS):
        if count > len(rows[layers[0]].x_TD) or (index > 3 and time.monotonic() > deadline):
            break
        progress("experts", 0.15 + 0.02 * index)
        natural = first_rows(rows, count)
        drawn = random_choices(natural, router.num_experts, seed=count)
        samples.append(time_experts(model, natural, True, stopwatch))
        samples.append(time_experts(model, drawn, False, stopwatch))
    columns = np.array([(1, s.num_choices, s.num_activated) for s in samples], dtype=np.float64)
    found = fit(columns, np.array([s.seconds for s in samples]))
    fits.append(_report("T_e experts", found))
    alpha_s, choice_s, expert_s = found.coefficients
    natural_samples = [s for s in samples if s.is_natural]
    return (
        fit_experts(router.num_experts, router.top_k, natural_samples),
        ExpertCost(alpha_s=alpha_s, choice_s=choice_s, expert_s=expert_s),
    )


def _measure_attention(
    model: MeasuredModel,
    kind: LayerKind,
    is_quick: bool,
    stopwatch: Stopwatch,
    progress: Progress,
    fits: list[FitReport],
) -> AttentionCost:
    cases = attention_cases(model, is_quick)
    random.Random(0).shuffle(cases)  # so that the first ones are a sample of all
    deadline = time.monotonic() + _ATTENTION_BUDGET_S / len(model.kinds)
    samples: list[AttentionSample] = []
    for index, case in enumerate(cases):
        if len(samples) >= _LEAST_CASES and time.monotonic() > deadline:
            break
        progress(f"attention, {kind.name}", 0.4 + 0.4 * index / len(cases))
        samples.append(time_attention(model, kind, case, stopwatch))
    cost, found = fit_attention(samples)
    fits.append(_report(f"T_a attention, {kind.name}", found))
    return cost


def _measure_link(
    model: MeasuredModel, is_quick: bool, is_sharing: bool, fits: list[FitReport]
) -> LinkCosts:
    """Measures ranks of one host, which share memory, or of two hosts, which use a process
    group."""
    setup = ExchangeSetup(
        width=model.spec.width,
        top_k=model.spec.router.top_k,
        dtype=str(model.dtype).removeprefix("torch."),
        rows=QUICK_EXCHANGES if is_quick else EXCHANGES,
        num_steps=8 if is_quick else 24,
        is_sharing=is_sharing,
    )
    samples = time_exchanges(setup)
    where = "" if is_sharing else ", gloo"
    lines = []
    for name, seconds in (
        ("exchange, attention rank", [s.attention_s for s in samples]),
        ("exchange, expert rank", [s.experts_s for s in samples]),
        ("T_c transfer", [s.transfer_s for s in samples]),
    ):
        found = _bytes_line(samples, seconds)
        fits.append(_report(name + where, found))
        lines.append(Line(*found.coefficients))
    return LinkCosts(attention=lines[0], experts=lines[1], transfer=lines[2])


def _bytes_line(samples: Sequence[ExchangeSample], seconds: Sequence[float]) -> Fit:
    """Fits a line to bytes. Times below a microsecond count as zero: no waiting process wakes
    faster."""
    if max(seconds) < 1e-6:
        return Fit(coefficients=(0.0, 0.0), r_squared=1.0, errors=(0.0,) * len(seconds))
    columns = np.array([(1, s.num_bytes) for s in samples], dtype=np.float64)
    return fit(columns, np.maximum(seconds, 1e-7))


def _measure_fixed(
    model: MeasuredModel, costs: StageCosts, is_quick: bool, fits: list[FitReport]
) -> StageCosts:
    """Measures whole colocated steps and subtracts the predicted time of their layers."""
    num_steps = 6 if is_quick else 16
    fixed, sampling = [], []
    batches = [n for n in _BATCHES if 4 * n <= model.cache.num_pages]
    for count in batches:
        greedy = decode_steps(model, count, num_steps, LocalTransport(model.experts), 0.0)
        drawn = decode_steps(model, count, num_steps, LocalTransport(model.experts), 1.0)
        layers_s = costs.colocated_time(BatchLoad.decode(count, greedy.context))
        fixed.append(DecodeSample(count, greedy.context, max(greedy.seconds - layers_s, 1e-7)))
        sampling.append(
            DecodeSample(count, drawn.context, max(drawn.seconds - greedy.seconds, 1e-7))
        )
    lines = [_step_line(samples) for samples in (fixed, sampling)]
    fits.append(_report("schedule and head", lines[0]))
    fits.append(_report("sampling", lines[1]))
    return replace(costs, fixed=Line(*lines[0].coefficients), sampling=Line(*lines[1].coefficients))


def _step_line(samples: Sequence[DecodeSample]) -> Fit:
    columns = np.array([(1, s.num_sequences) for s in samples], dtype=np.float64)
    return fit(columns, np.array([s.seconds for s in samples]))


def _report(name: str, found: Fit) -> FitReport:
    return FitReport(
        name=name,
        num_samples=len(found.errors),
        r_squared=found.r_squared,
        median_error=found.median_error,
        max_error=found.max_error,
    )


def _model_facts(model: MeasuredModel) -> CalibratedModel:
    spec, itemsize = model.spec, model.dtype.itemsize
    weights = weight_bytes(model.folder, spec, itemsize)
    return CalibratedModel(
        name=folder_model_name(model.folder.resolve()),
        identity=model_identity(model.folder).hex(),
        family=spec.family,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=spec.num_layers,
        max_context=spec.max_positions,
        attention_bytes=weights.attention,
        expert_bytes=weights.experts,
        kv_token_bytes=spec.kv_bytes_per_token(itemsize),
        num_kv_parts=1 if spec.latent is not None else spec.attention.num_kv_heads,
    )


def _machine_facts(model: MeasuredModel) -> MachineFacts:
    is_cuda = model.device.type == "cuda"
    return MachineFacts(
        host=f"{platform.system()} {platform.machine()}",
        device=torch.cuda.get_device_name(model.device) if is_cuda else "cpu",
        num_threads=model.num_threads,
        kernels=model.kernels.name,
        torch=str(torch.__version__),
        moe_serve=__version__,
    )
