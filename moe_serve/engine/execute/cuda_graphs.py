"""Decides whether decode steps are captured as CUDA graphs."""

from __future__ import annotations

import logging

import torch

from moe_kernels.graphs.graph_recorder import CudaRecorder, GraphRecorder
from moe_kernels.graphs.graph_sizes import GraphSize, context_buckets, row_buckets
from moe_kernels.interface.kernels import Kernels
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.execute.step_executor import StepRunner
from moe_serve.errors import ConfigError
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.pipeline.graphs.decode_graphs import DecodeGraphs, GraphedPipeline
from moe_serve.pipeline.pipeline import Pipeline

_log = logging.getLogger(__name__)


def with_cuda_graphs(
    pipeline: Pipeline,
    stage: AttentionStage,
    cache: KVCache,
    config: EngineConfig,
    max_model_len: int,
    micro_batches: int,
) -> tuple[StepRunner, str | None]:
    """Returns the pipeline, or one that replays its decode steps, and a description for the log.

    The description is None if there is nothing to report. Raises ConfigError if `model.cuda_graphs`
    is on and no step can be captured.
    """
    wanted, device = config.model.cuda_graphs, cache.device
    is_cpu = device.type != "cuda"
    if wanted == "off":
        return pipeline, None if is_cpu else "off"
    refusal = capture_refusal(stage.kernels, device, micro_batches)
    if refusal is None and config.model.expert_memory_bytes is not None:
        refusal = "experts that are read on demand (expert_memory_bytes) cannot be captured"
    if refusal is not None:
        if wanted == "on":
            raise ConfigError(f"model.cuda_graphs is 'on', but {refusal}: use 'auto' or 'off'.")
        return pipeline, None if is_cpu else f"off: {refusal}"
    try:
        graphs = DecodeGraphs(
            pipeline,
            stage,
            cache,
            make_recorder(device),
            graph_sizes(config, max_model_len),
            max_model_len,
        )
    except RuntimeError as error:
        if wanted == "on":
            raise ConfigError(
                f"model.cuda_graphs is 'on', but capturing failed ({error}): use 'auto' or 'off'."
            ) from error
        _log.warning("CUDA graphs could not be captured, steps run without: %s", error)
        return pipeline, f"off: capturing failed ({error})"
    _log.info("CUDA graphs: %s", graphs.stats)
    return GraphedPipeline(pipeline, graphs), str(graphs.stats)


def capture_refusal(kernels: Kernels, device: torch.device, micro_batches: int) -> str | None:
    """Returns the reason why steps cannot be captured; None if they can."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA GPU, and the device is {device}"
    if not kernels.can_be_captured:
        return f"only the triton kernels can be captured, and the kernels are {kernels.name}"
    if micro_batches > 1:
        return (
            f"steps are cut into {micro_batches} micro-batches, and only whole ones can be captured"
        )
    return None


def make_recorder(device: torch.device) -> GraphRecorder:
    return CudaRecorder(device)


def graph_sizes(config: EngineConfig, max_model_len: int) -> list[GraphSize]:
    """Returns all sizes to capture: fixed numbers of rows, each with fixed numbers of keys."""
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_batched_tokens)
    most = min(most, config.model.cuda_graph_max_rows or most)
    contexts = context_buckets(max_model_len)
    return [GraphSize(rows, context) for rows in row_buckets(most) for context in contexts]
