"""Plans the memory of a configuration from the model's config: one process, or ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from experts.placement.problem.placement import Placement
from moe_serve.adapters.adapter_size import AdapterBytes, configured_bytes, reserved_bytes
from moe_serve.cache.kv_cache import checked_kv_form, num_pages
from moe_serve.cluster.members.cluster_model import num_slots, placement_of
from moe_serve.config.cell_config import cell_shapes, config_of_cell, has_ranks
from moe_serve.config.sections import EngineConfig, ModelConfig
from moe_serve.engine.execute.next_layer_prediction import num_foreseen
from moe_serve.engine.memory.free_memory import free_bytes
from moe_serve.engine.memory.memory_plan import MemoryPlan, ProcessMemory, Room
from moe_serve.engine.opened_model import ServedCheckpoint, device_of, kv_bytes_per_token
from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import (
    Stored,
    Table,
    attention_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families import family_of
from moe_serve.model.families.mtp import MTPLayer
from moe_serve.model.spec import ModelSpec
from moe_serve.pipeline.frames.wire import make_wire_format


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes as loaded, of the routed experts and of everything else."""

    attention: int
    experts: int


def weight_bytes(folder: Path, spec: ModelSpec, itemsize: int) -> WeightBytes:
    """Returns shapes times `itemsize`; raises CheckpointError as reading the config does."""
    names = family_of(HFConfig.read(folder)).names_in(lambda _: True)
    attention = sum(math.prod(item.shape) for item in _attention_weights(names, spec))
    num_sparse = sum(layer.is_sparse for layer in spec.layers)
    expert = 3 * spec.width * spec.expert_width
    return WeightBytes(
        attention=attention * itemsize,
        experts=num_sparse * spec.router.num_experts * expert * itemsize,
    )


def stored_bytes(
    folder: Path, spec: ModelSpec, floats: WeightBytes, config: ModelConfig
) -> WeightBytes:
    """Returns the bytes of a quantised checkpoint's weights as its files have them, where they stay
    packed; those of `floats` for the others, and for a folder that has no files yet.
    """
    if not any(folder.glob("*.safetensors")):
        return floats
    checkpoint, of_module, total = Checkpoint(folder), Counter[str](), 0
    for name in checkpoint:
        header = checkpoint.header(name)
        of_module[_module(name)] += header.end - header.begin
        total += header.end - header.begin
    names = family_of(HFConfig.read(folder)).names_in(checkpoint.__contains__)
    modules = {_module(item.name) for item in _attention_weights(names, spec)}
    attention = sum(of_module[module] for module in modules)
    experts = min(floats.experts, total - attention)
    return WeightBytes(
        min(floats.attention, attention)
        if config.linear_weights != "dequantised"
        else floats.attention,
        experts if config.expert_weights != "dequantised" else floats.experts,
    )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _attention_weights(names: TensorNames, spec: ModelSpec) -> Iterator[Stored]:
    """Yields all weights but those of routed experts."""
    yield from model_table(names, spec).values()
    for layer in range(spec.num_layers):
        yield from attention_table(names, spec, layer).values()
        yield from feed_forward_table(names, spec, layer).values()


def mtp_bytes(layer: MTPLayer, itemsize: int) -> int:
    """Returns the bytes of a layer that drafts, with its experts. Each attention rank has it
    whole."""
    spec = layer.spec
    expert = 3 * spec.width * spec.expert_width
    num_experts = spec.num_sparse_layers * spec.router.num_experts
    return (_numel(layer.tables()) + num_experts * expert) * itemsize


def _numel(tables: Iterable[Table]) -> int:
    return sum(math.prod(stored.shape) for table in tables for stored in table.values())


SERVER = "server"


def plan_memory(config: EngineConfig, *, has_local_ranks: bool = True) -> MemoryPlan:
    """Plans from config.json alone. Raises ConfigError if not even one request's pages would
    fit.

    `has_local_ranks` False: ranks are also on other machines, whose memory is not checked.
    """
    return _Planner.read(config).plan(has_local_ranks)


@dataclass(frozen=True, slots=True)
class _Planner:
    config: EngineConfig
    checkpoint: ServedCheckpoint
    dtype: torch.dtype
    weights: WeightBytes
    mtp: MTPLayer | None
    device: torch.device
    adapters: AdapterBytes

    @classmethod
    def read(cls, config: EngineConfig) -> _Planner:
        checkpoint = ServedCheckpoint.read(config.model)
        folder, spec = checkpoint.folder, checkpoint.spec
        name = config.model.dtype if config.model.dtype != "auto" else spec.dtype
        dtype = _embedding_dtype(folder) if name is None else getattr(torch, name)
        weights = weight_bytes(folder, spec, dtype.itemsize)
        if HFConfig.read(folder).quantization() is not None:
            weights = stored_bytes(folder, spec, weights, config.model)
        mtp = checkpoint.mtp_layer(config)
        if mtp is not None:
            attention = weights.attention + mtp_bytes(mtp, dtype.itemsize)
            weights = WeightBytes(attention, weights.experts)
        device = device_of(config.model)
        has_triton = device.type == "cuda" or config.model.kernels == "triton"
        is_merging = has_triton or config.adapters.expert_lora == "merged"
        adapters = configured_bytes(
            config.adapters, folder, spec, dtype.itemsize, is_merging=is_merging
        )
        return cls(config, checkpoint, dtype, weights, mtp, device, adapters)

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def plan(self, has_local_ranks: bool) -> MemoryPlan:
        free = free_bytes(self.device)
        shapes = cell_shapes(self.config)
        if shapes:
            processes = [
                replace(process, name=f"cell-{index}/{process.name}")
                for index, shape in enumerate(shapes)
                for process in self._ranks(free, config_of_cell(self.config, index, shape))
            ]
        elif self.config.cluster.is_disaggregated:
            processes = self._ranks(free, self.config)
        else:
            processes = [self._one_process(free)]
        rooms = self._rooms(processes, free, has_local_ranks)
        return MemoryPlan(processes=tuple(processes), rooms=rooms)

    def _ranks(self, free: int, config: EngineConfig) -> list[ProcessMemory]:
        of = replace(self, config=config)
        return [*of._attention_ranks(free), *of._expert_ranks()]

    def _one_process(self, free: int) -> ProcessMemory:
        weights = self.weights.attention + self._held(self.weights.experts)
        adapters = self._adapters(self.adapters.total)
        pages, kv_bytes = self._pages(free - weights - adapters)
        return ProcessMemory(
            name=SERVER,
            device=self.device.type,
            weights=weights,
            kv_bytes=kv_bytes,
            num_pages=pages,
            adapters=adapters,
        )

    def _attention_ranks(self, free: int) -> list[ProcessMemory]:
        """Counts the shards of a rank as one process: together they hold the layers once."""
        cluster = self.config.cluster
        adapters = self._adapters(self.adapters.attention)
        pages, kv_bytes = self._pages(free - self.weights.attention - adapters)
        return [
            ProcessMemory(
                name=f"attention-{index}",
                device=self.device.type,
                weights=self.weights.attention,
                kv_bytes=kv_bytes,
                num_pages=pages,
                buffers=self._buffers() * cluster.expert_ranks,
                adapters=adapters,
            )
            for index in range(cluster.attention_ranks)
        ]

    def _expert_ranks(self) -> list[ProcessMemory]:
        cluster = self.config.cluster
        placement = placement_of(cluster, self.spec)
        num_layers = max(1, len(placement.ranks_of))
        each = self.weights.experts // (num_layers * self.spec.router.num_experts)
        has_all = cluster.rebalance != "off"  # each rank holds all experts of adapters
        own = self.adapters.experts // (1 if has_all else cluster.expert_ranks)
        return [
            ProcessMemory(
                name=f"expert-{index}",
                device=self.device.type,
                weights=self._held(each * self._num_experts(placement, index)),
                buffers=self._buffers() * cluster.attention_ranks,
                adapters=self._adapters(own),
            )
            for index in range(cluster.expert_ranks)
        ]

    def _adapters(self, configured: int) -> int:
        return reserved_bytes(self.config.adapters, configured)

    def _num_experts(self, placement: Placement, rank: int) -> int:
        """Returns the experts in all layers for which an expert rank has memory."""
        held = sum(map(len, placement.held_by(rank).values()))
        return num_slots(placement, self.config, rank) or held

    def _held(self, num_bytes: int) -> int:
        limit = self.config.model.expert_memory_bytes
        return num_bytes if limit is None else min(num_bytes, limit)

    def _pages(self, available: int) -> tuple[int, int]:
        form = checked_kv_form(self.config.cache, self.spec)
        token_bytes = kv_bytes_per_token(self.spec, self.mtp, self.dtype.itemsize, form)
        max_model_len = self.checkpoint.max_model_len
        if available <= 0:  # the plan reports this, not the size of the cache
            available = 4 * max_model_len * token_bytes
        pages = num_pages(
            self.config.cache,
            bytes_per_token=token_bytes,
            max_model_len=max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            available_bytes=available,
        )
        return pages, pages * self.config.cache.page_size * token_bytes

    def _buffers(self) -> int:
        """Returns the bytes of frames between one attention and one expert rank, for the largest
        step."""
        cluster, rows = self.config.cluster, self.config.scheduler.max_batched_tokens
        wire = make_wire_format(
            self.spec.width,
            self.spec.router.top_k,
            self.dtype,
            cluster.expert_ranks,
            cluster.wire_dtype,
            num_foreseen(self.config, self.spec),
        )
        return wire.dispatch_bytes(rows) + wire.combine_bytes(rows)

    def _rooms(
        self, processes: list[ProcessMemory], free: int, has_local_ranks: bool
    ) -> tuple[Room, ...]:
        """Returns the memory to check. GPUs of ranks are left out: checking would take memory on
        each."""
        if has_ranks(self.config) and (self.device.type == "cuda" or not has_local_ranks):
            return ()
        name = "this machine" if self.device.type == "cpu" else f"the GPU {self.device}"
        return (Room(name=name, free=free, users=tuple(p.name for p in processes)),)


def _embedding_dtype(folder: Path) -> torch.dtype:
    """Returns the dtype that a model without one in its config is served in."""
    if not any(folder.glob("*.safetensors")):
        return torch.float32
    checkpoint = Checkpoint(folder)
    names = family_of(HFConfig.read(folder)).names_in(checkpoint.__contains__)
    return checkpoint.view(names.embedding).dtype
