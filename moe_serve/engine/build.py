"""Builds a running engine from a configuration: device, dtype, weights, cache and pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from experts.expert_stage import ExpertStage
from moe_kernels.choice import default_num_threads
from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.model_identity import model_identity
from moe_serve.cache.page_times import SampledPages
from moe_serve.cache.sizing import check_page_size, num_pages
from moe_serve.config.sections import EngineConfig, ModelConfig
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.cuda_graphs import with_cuda_graphs
from moe_serve.engine.execute.next_layer_prediction import open_next_layer
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_timeline import StepTimeline, WatchedRunner
from moe_serve.engine.layout import Layout, memory_line
from moe_serve.engine.memory.allocator import keep_freed_memory
from moe_serve.engine.memory.free_memory import free_bytes
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.sampling.answer_masks import AnswerMasks
from moe_serve.engine.sampling.grammar.grammars import Grammars
from moe_serve.engine.sampling.grammar.vocabulary import read_vocabulary
from moe_serve.engine.sampling.sampling_backend import make_sampler
from moe_serve.engine.schedule.policy.build import policy_maker
from moe_serve.engine.watch.hang_watch import ActivityReport, LocalActivity
from moe_serve.errors import CheckpointError, ConfigError
from moe_serve.model.checkpoint.demo import demo_model_folder
from moe_serve.model.checkpoint.hf_config import generation_eos_token_ids
from moe_serve.model.load.load_expert_memory import MemoryBudget
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.load.model_tensors import LoadProgress
from moe_serve.model.load.weight_reader import OpenWeights, open_checkpoint
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.gather import Gather
from moe_serve.pipeline.frames.wire import make_wire_format
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.transport import LocalTransport
from moe_serve.regular_file import is_there


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and the parts that servers and tools need beside it."""

    engine: DrivenEngine
    layout: Layout
    spec: ModelSpec
    routes: RouteListeners = field(default_factory=RouteListeners)  # receive its routing
    placement: PlacementControl | None = None  # None: no expert ranks
    last_step: Callable[[], StepTimeline | None] | None = None  # None: steps are not recorded
    grammars: Grammars | None = None  # for constrained answers
    activity: ActivityReport | None = None  # for hang reports


def model_folder(config: ModelConfig) -> Path:
    """Return the checkpoint's folder. Raises CheckpointError if it is missing or incomplete."""
    folder = demo_model_folder() if config.path is None else Path(config.path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: give a local checkpoint in Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json)."
        )
    if not is_there(folder / "config.json"):
        raise CheckpointError(
            f"{folder} has no config.json: give the folder of a checkpoint in Hugging Face layout."
        )
    return folder


def build_engine(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    open_weights: OpenWeights = open_checkpoint,
) -> BuiltEngine:
    """Load the model and build the engine. `open_weights` opens the checkpoint's weights.

    Sets the number of torch threads of this process: the configured number, or 1 if the kernels
    have their own threads.
    """
    clock = time.monotonic()
    keep_freed_memory()
    num_threads = config.model.num_threads or default_num_threads()
    folder, device = model_folder(config.model), device_of(config.model)
    loader = open_loader(folder, config.model, num_threads, device, progress, open_weights)
    check_page_size(config.cache.page_size, loader.kernels)
    torch.set_num_threads(1 if loader.kernels.has_own_threads else num_threads)
    spec, max_model_len = loader.spec, max_model_len_of(config.model, loader.spec)
    eos = eos_token_ids_of(folder, spec)
    grammars = grammars_of(folder, spec, eos)
    tap, routes = RouteTap(spec.router.num_experts), RouteListeners()
    make_policy = policy_maker(config, folder, spec, routes)  # first, as it may refuse
    next_layer = open_next_layer(config, folder, loader)
    experts = loader.expert_stage(budget=MemoryBudget.of(config.model))
    part = load_attention(loader, config, max_model_len)
    transport = _local_transport(loader, experts, config)
    log = StageLog()
    pipeline = Pipeline(part.stage, transport, part.cache, device, log, tap, next_layer)
    cuts = config.pipeline.num_in_one_process
    runner, graphs = with_cuda_graphs(pipeline, part.stage, part.cache, config, max_model_len, cuts)
    watched = WatchedRunner(runner, log)
    masks = AnswerMasks(spec.vocab_size, eos, grammars)
    executor = LocalExecutor(watched, make_sampler(eos, loader.kernels), tap, experts.memory, masks)
    engine = Engine(
        executor,
        scheduler=config.scheduler,
        num_pages=part.num_pages,
        page_size=config.cache.page_size,
        micro_batches=cuts,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        model_identity=_identity(folder, loader),
        has_prefix_cache=config.cache.prefix_cache,
        sampled_pages=SampledPages(config.cache.metrics_sample),
        policy=make_policy(),
        routes=routes,
    )
    has_memory = experts.memory is not None
    layout = _layout(folder, loader, config, part, graphs, time.monotonic() - clock, has_memory)
    has_times = device.type == "cpu"  # on a GPU this would time kernel launches only
    last_step = watched.last_step if has_times else None
    return BuiltEngine(
        engine,
        layout,
        spec,
        routes,
        last_step=last_step,
        grammars=grammars,
        activity=LocalActivity(executor, log),
    )


def _layout(
    folder: Path,
    loader: ModelLoader,
    config: EngineConfig,
    part: AttentionPart,
    graphs: str | None,
    load_seconds: float,
    has_memory: bool,
) -> Layout:
    spec = loader.spec
    return Layout(
        folder=folder,
        family=spec.family,
        num_layers=spec.num_layers,
        num_experts=spec.router.num_experts,
        top_k=spec.router.top_k,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len_of(config.model, spec),
        dtype=str(loader.dtype).removeprefix("torch."),
        device=str(device_of(config.model)),
        kernels=loader.kernels.name,
        cuda_graphs=graphs,
        weight_format=loader.weight_format,
        expert_weights=loader.expert_weights,
        num_threads=config.model.num_threads or default_num_threads(),
        num_pages=part.num_pages,
        page_size=config.cache.page_size,
        kv_bytes=part.kv_bytes,
        micro_batches=config.pipeline.num_in_one_process,
        load_seconds=load_seconds,
        expert_memory=memory_line(config.model) if has_memory else None,
    )


def grammars_of(folder: Path, spec: ModelSpec, eos_token_ids: frozenset[int]) -> Grammars:
    """Return the model's grammars. The tokenizer is read at the first constraint."""
    return Grammars(lambda: read_vocabulary(folder, spec.vocab_size, eos_token_ids))


def _identity(folder: Path, loader: ModelLoader) -> bytes:
    """Return the identity that cached pages belong to: the weights and how they are computed."""
    return model_identity(folder, str(loader.dtype), loader.kernels.name, loader.expert_weights)


def _local_transport(
    loader: ModelLoader, stage: ExpertStage, config: EngineConfig
) -> LocalTransport:
    """Build the local transport, which rounds rows like ranks if `cluster.wire_dtype` is set."""
    spec, wire_dtype, wire = loader.spec, config.cluster.wire_dtype, None
    if wire_dtype != "auto":
        wire = make_wire_format(spec.width, spec.router.top_k, loader.dtype, 1, wire_dtype)
    return LocalTransport(stage, wire)


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The attention stage and the cache that it writes to."""

    stage: AttentionStage
    cache: KVCache
    num_pages: int
    kv_bytes: int


def load_attention(
    loader: ModelLoader, config: EngineConfig, max_model_len: int, gather: Gather | None = None
) -> AttentionPart:
    """Load everything but the routed experts, or one shard's part of it, and build the configured
    cache."""
    stage = loader.attention_stage(max_model_len, gather)
    spec = stage.spec
    token_bytes = spec.kv_bytes_per_token(loader.dtype.itemsize)
    pages = num_pages(
        config.cache,
        bytes_per_token=token_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        available_bytes=free_bytes(loader.device),
    )
    page_size = config.cache.page_size
    cache = KVCache(spec, pages, page_size, loader.dtype, loader.device)
    return AttentionPart(stage, cache, pages, pages * page_size * token_bytes)


def open_loader(
    folder: Path,
    config: ModelConfig,
    num_threads: int,
    device: torch.device,
    progress: LoadProgress | None,
    open_weights: OpenWeights = open_checkpoint,
) -> ModelLoader:
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        return ModelLoader(
            folder,
            dtype=dtype,
            device=device,
            kernels=config.kernels,
            num_threads=num_threads,
            expert_weights=config.expert_weights,
            progress=progress,
            open_weights=open_weights,
        )
    except RuntimeError as error:
        raise ConfigError(f"model.kernels is {config.kernels!r}: {error}.") from error


def device_of(config: ModelConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA GPU here: use 'cpu' or 'auto'."
        )
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def max_model_len_of(config: ModelConfig, spec: ModelSpec) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return spec.max_positions
    if not 2 <= wanted <= spec.max_positions:
        raise ConfigError(
            f"max_model_len ({wanted}) must be in [2, {spec.max_positions}], the model's context."
        )
    return wanted


def eos_token_ids_of(folder: Path, spec: ModelSpec) -> frozenset[int]:
    ids = frozenset(generation_eos_token_ids(folder) or spec.eos_token_ids)
    if ids and max(ids) >= spec.vocab_size:
        raise CheckpointError(
            f"{folder / 'generation_config.json'}: eos_token_id {max(ids)} is outside the "
            f"vocabulary of {spec.vocab_size} tokens."
        )
    return ids
