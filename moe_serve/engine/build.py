"""Builds a running engine from a configuration: device, dtype, weights, cache and pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from experts.expert_stage import ExpertStage
from moe_kernels.kernel_choice import default_num_threads
from moe_serve.adapters.adapter_part import LiveModel
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.cache.events.kv_events import KVEvents, check_kv_events
from moe_serve.cache.kv_cache import check_page_size
from moe_serve.cache.page_times import SampledPages
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build_adapters import check_adapters, open_adapters
from moe_serve.engine.build_tiers import check_tiers, tier_maker
from moe_serve.engine.drafting.drafting_maker import drafting_maker
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.engine import Engine
from moe_serve.engine.engine_facts import EngineFacts, memory_line
from moe_serve.engine.execute.cuda_graphs import with_cuda_graphs
from moe_serve.engine.execute.next_layer_prediction import open_next_layer
from moe_serve.engine.execute.self_drafter import SelfDrafter
from moe_serve.engine.execute.step_drafter import StepDrafter
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_timeline import StepTimeline, StepWatch
from moe_serve.engine.memory.allocator import keep_freed_memory
from moe_serve.engine.opened_model import (
    AttentionPart,
    LoadReport,
    OpenedModel,
    device_of,
    model_folder,
)
from moe_serve.engine.request.stats import EngineStats
from moe_serve.engine.routes.cell_placements import CellPlacements
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.sampling.answer_masks import AnswerMasks
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.sampling_backend import SamplingBackend, make_sampler
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.engine.schedule.policy.policy_maker import policy_maker
from moe_serve.engine.watch.cells_control import CellsControl
from moe_serve.engine.watch.hang_watch import ActivityReport, LocalActivity
from moe_serve.errors import ConfigError
from moe_serve.model.load.load_expert_memory import MemoryBudget
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.load.weight_reader import LoadProgress, OpenWeights, open_checkpoint
from moe_serve.model.spec import ModelSpec
from moe_serve.pipeline.exchange.next_layer import NextLayer
from moe_serve.pipeline.frames.wire import make_wire_format
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.stacked_layers import StackedLayers
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.transport import FewerExperts, LocalTransport


def _no_nudge() -> None:
    """Does nothing. Only a step of several cells waits while a new request could start."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and the parts that servers and tools need beside it."""

    engine: DrivenEngine
    layout: EngineFacts
    spec: ModelSpec
    routes: RouteListeners = field(
        default_factory=RouteListeners
    )  # objects that receive its routing
    placement: PlacementControl | None = None  # None: no expert ranks, or several cells
    cell_placements: CellPlacements | None = None  # None: one cell
    last_step: Callable[[], StepTimeline | None] | None = None  # None: steps are not recorded
    grammars: Grammars | None = None  # for constrained answers
    activity: ActivityReport | None = None  # for hang reports
    adapters: AdapterRegistry | None = None  # None: requests cannot name one
    cells: CellsControl | None = None  # None: there is one cell
    # starts autoscaling; None if the number of cells is fixed
    scale_with: Callable[[Callable[[], EngineStats], CellsControl], None] | None = None
    nudge: Callable[[], None] = _no_nudge  # ends a step's wait for cells when a request arrives
    kv_events: KVEvents | None = None  # None: the engine has none


def build_engine(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    open_weights: OpenWeights = open_checkpoint,
) -> BuiltEngine:
    """Loads the model and builds the engine. `open_weights` opens the checkpoint's weights. Sets
    this process's number of torch threads: as configured, or 1 if the kernels have their own
    threads."""
    clock = time.monotonic()
    model = _opened(config, progress, open_weights)
    loader, spec, max_model_len = model.loader, model.spec, model.max_model_len
    eos, grammars = model.eos_token_ids, model.grammars()
    tap, routes, log = RouteTap(spec.router.num_experts), RouteListeners(), StageLog()
    make_policy = policy_maker(config, model.folder, spec, routes)  # first, because it may raise
    next_layer = open_next_layer(config, model.folder, loader)
    experts = loader.expert_stage(budget=MemoryBudget.of(config.model))
    part = model.load_attention(config)
    adapters = open_adapters(config, loader, LiveModel(attention=part.stage))
    pipeline = _pipeline(config, part, loader, experts, (log, tap, next_layer), adapters)
    cuts, watch = config.pipeline.num_in_one_process, StepWatch(log)
    runner, graphs = with_cuda_graphs(pipeline, part.stage, part.cache, config, max_model_len, cuts)
    sampler, masks, drafter = _sampling(config, model, grammars, part, pipeline, experts)
    executor = LocalExecutor(
        runner, sampler, tap, experts.memory, masks, watch, drafter, pipeline.parked
    )
    report = model.report(part)
    events = KVEvents(config)
    engine = Engine(
        executor,
        scheduler=config.scheduler,
        num_pages=part.num_pages,
        page_size=config.cache.page_size,
        micro_batches=cuts,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        model_identity=model.page_identity(report),
        has_prefix_cache=config.cache.prefix_cache,
        sampled_pages=SampledPages(config.cache.metrics_sample),
        listener=events.listener(0),
        policy=make_policy(),
        routes=routes,
        drafting=drafting_maker(config.speculation, spec.vocab_size, model.stop_rule)(),
        make_tier=tier_maker(config, model, part.cache, report),
        window=None if part.mtp else spec.window,  # its own layers may have none
        layered=LayeredPrefill.of(config, spec, report.device, report.dtype),
    )
    return BuiltEngine(
        engine,
        _facts(config, model, report, experts, graphs, time.monotonic() - clock),
        spec,
        routes,
        last_step=watch.last_step if loader.device.type == "cpu" else None,  # else: launches
        grammars=grammars,
        activity=LocalActivity(executor, log),
        adapters=adapters,
        kv_events=events,
    )


def _facts(
    config: EngineConfig,
    model: OpenedModel,
    report: LoadReport,
    experts: ExpertStage,
    graphs: str | None,
    seconds: float,
) -> EngineFacts:
    return EngineFacts.of(
        model,
        report,
        page_size=config.cache.page_size,
        micro_batches=config.pipeline.num_in_one_process,
        load_seconds=seconds,
        cuda_graphs=graphs,
        expert_memory=None if experts.memory is None else memory_line(config.model),
    )


def _sampling(
    config: EngineConfig,
    model: OpenedModel,
    grammars: Grammars,
    part: AttentionPart,
    pipeline: Pipeline,
    experts: ExpertStage,
) -> tuple[SamplingBackend, AnswerMasks, StepDrafter | None]:
    """Builds the objects that sample a step's tokens: a sampler, masks, and a drafter for the next
    step.
    """
    eos = model.eos_token_ids
    masks = AnswerMasks(model.spec.vocab_size, eos, grammars)
    by_self = _self_drafter(config, model.spec, part, experts, pipeline.device)
    drafter = StepDrafter.of(config, model.folder, masks, part.stage, pipeline, part.mtp, by_self)
    return make_sampler(eos, model.loader.kernels), masks, drafter


def _self_drafter(
    config: EngineConfig,
    spec: ModelSpec,
    part: AttentionPart,
    experts: ExpertStage,
    device: torch.device,
) -> SelfDrafter | None:
    """Builds the drafter that uses the model itself, if it is configured. Raises ConfigError if the
    model cannot run with fewer experts.
    """
    if config.speculation.method != "self":
        return None
    wanted, top_k = config.speculation.self_experts, spec.router.top_k
    if wanted >= top_k:
        raise ConfigError(
            f"speculation.self_experts is {wanted} and must be less than {top_k}, the number of "
            "experts that this model runs for each token: give a smaller number, or set "
            "speculation.method to 'auto'."
        )
    if config.cluster.wire_dtype != "auto":
        raise ConfigError(
            "speculation.method 'self' does not round the rows of its drafts to "
            f"cluster.wire_dtype {config.cluster.wire_dtype!r}, so the two cannot be "
            "combined: leave out cluster.wire_dtype, or set speculation.method to 'auto'."
        )
    pipeline = Pipeline(part.stage, FewerExperts(experts, wanted), part.cache, device)
    return SelfDrafter(pipeline, config.cache.page_size)


def _opened(
    config: EngineConfig, progress: LoadProgress | None, open_weights: OpenWeights
) -> OpenedModel:
    of = config.model
    check_tiers(config)
    check_kv_events(config)
    check_adapters(config)
    keep_freed_memory()
    num_threads = of.num_threads or default_num_threads()
    folder, device = model_folder(of), device_of(of)
    model = OpenedModel.open(folder, of, num_threads, device, progress, open_weights)
    check_page_size(config.cache.page_size, model.loader.kernels)
    model.set_torch_threads()
    return model


def _pipeline(
    config: EngineConfig,
    part: AttentionPart,
    loader: ModelLoader,
    experts: ExpertStage,
    beside: tuple[StageLog, RouteTap, NextLayer | None],
    adapters: AdapterRegistry | None,
) -> Pipeline:
    """Builds the pipeline of this process, with all layers in one call if nothing lies between."""
    transport, (*_, next_layer) = _local_transport(loader, experts, config), beside
    parts = part.stage, transport, part.cache, loader.device
    pipeline = Pipeline(*parts, *beside, adapters=adapters)
    if next_layer is None and config.cluster.wire_dtype == "auto":
        pipeline.stacked = StackedLayers.of(part.stage, experts, part.cache)
    return pipeline


def _local_transport(
    loader: ModelLoader, stage: ExpertStage, config: EngineConfig
) -> LocalTransport:
    """Builds the local transport, which rounds rows like ranks if `cluster.wire_dtype` is set."""
    spec, wire_dtype, wire = loader.spec, config.cluster.wire_dtype, None
    if wire_dtype != "auto":
        wire = make_wire_format(spec.width, spec.router.top_k, loader.dtype, 1, wire_dtype)
    return LocalTransport(stage, wire)
