"""Estimates the memory of adapters from the headers of their files, before any weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_serve.adapters.adapter_files import (
    BITDELTA_CONFIG,
    ESFT_CONFIG,
    PEFT_CONFIG,
    weight_files,
)
from moe_serve.adapters.low_rank import linear_parts, padded_rank
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.manifest import Shape, attention_table
from moe_serve.model.checkpoint.safetensors_file import SafetensorsFile
from moe_serve.model.families import family_of
from moe_serve.model.spec import ModelSpec
from moe_serve.regular_file import is_there

_LORA = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.(\d+)\.\w+$")
_ROUTED = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBytes:
    """The bytes of adapters on an attention rank, and on all expert ranks together."""

    attention: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.attention + self.experts

    def __add__(self, other: AdapterBytes) -> AdapterBytes:
        return AdapterBytes(
            attention=self.attention + other.attention, experts=self.experts + other.experts
        )


def configured_bytes(
    config: AdapterConfig, model: Path, spec: ModelSpec, itemsize: int, *, is_merging: bool
) -> AdapterBytes:
    """Returns the bytes of all configured adapters. One that cannot be read counts as empty: it is
    refused when it is loaded. `is_merging`: LoRAs of experts become copies of them."""
    total = AdapterBytes()
    for item in config.modules:
        try:
            folder = Path(item.partition("=")[2]).expanduser()
            total += adapter_bytes(folder, model, spec, itemsize, is_merging=is_merging)
        except (CheckpointError, OSError):
            continue
    return total


def reserved_bytes(config: AdapterConfig, configured: int) -> int:
    """Returns the bytes for adapters in one process: the limit where clients may load more, else
    those that are configured there."""
    limit = config.memory_bytes
    if limit is None:
        return configured
    return limit if config.root is not None else min(limit, configured)


def adapter_bytes(
    folder: Path, model: Path, spec: ModelSpec, itemsize: int, *, is_merging: bool
) -> AdapterBytes:
    """Returns the bytes of an adapter of a model, in memory with values of `itemsize` bytes. Raises
    CheckpointError and OSError."""
    configs = [n for n in (PEFT_CONFIG, ESFT_CONFIG, BITDELTA_CONFIG) if is_there(folder / n)]
    if len(configs) != 1:
        raise CheckpointError(f"{folder} has no configuration of an adapter.")
    shapes: dict[str, Shape] = {}
    stored: dict[str, int] = {}
    for path in weight_files(folder, configs[0]):
        for name, header in SafetensorsFile(path).headers.items():
            shapes[name], stored[name] = header.shape, header.end - header.begin
    if configs[0] == PEFT_CONFIG:
        return _lora_bytes(shapes, model, spec, itemsize, is_merging=is_merging)
    if configs[0] == ESFT_CONFIG:
        stored = {name: math.prod(shape) * itemsize for name, shape in shapes.items()}
    elif spec.is_head_tied:  # a BitDelta holds its embedding twice: also packed, as the head
        names = family_of(HFConfig.read(model)).names_in(lambda _: True)
        stored["head"] = stored.get(names.embedding, 0)
    experts = sum(size for name, size in stored.items() if _ROUTED in name)
    return AdapterBytes(attention=sum(stored.values()) - experts, experts=experts)


def _lora_bytes(
    shapes: Mapping[str, Shape], model: Path, spec: ModelSpec, itemsize: int, *, is_merging: bool
) -> AdapterBytes:
    """Counts A of a LoRA of attention with the padded rank of each linear layer; a LoRA of MLPs or
    experts counts as additions, or as merged copies."""
    names = family_of(HFConfig.read(model)).names_in(lambda _: True)
    ranks: dict[str, int] = {}
    for name, shape in shapes.items():
        found = _LORA.fullmatch(name)
        if found is not None and found["side"] == "A" and len(shape) > 1:
            ranks[found["module"]] = shape[-2]
    attention = 0
    for layer in range(spec.num_layers):
        table = attention_table(names, spec, layer)
        for parts in linear_parts(spec).values():
            modules = {p: table[p].name.removesuffix(".weight") for p in parts if p in table}
            own = {part: ranks.pop(module) for part, module in modules.items() if module in ranks}
            if own:
                outputs = sum(rank * table[part].shape[0] for part, rank in own.items())
                inputs = table[next(iter(own))].shape[1]
                attention += (padded_rank(sum(own.values())) * inputs + outputs) * itemsize
    if is_merging:
        return AdapterBytes(attention=attention) + _merged_bytes(ranks, spec, itemsize)
    return AdapterBytes(attention=attention) + _added_bytes(shapes, ranks, spec, itemsize)


def _merged_bytes(modules: Collection[str], spec: ModelSpec, itemsize: int) -> AdapterBytes:
    """Returns the bytes of copies of the experts and MLPs that these modules belong to."""
    num_experts, layers = _changed_experts(modules, spec)
    shared_width = 0 if spec.shared is None else spec.shared.width
    widths = (shared_width if spec.layers[i].is_sparse else spec.dense_width or 0 for i in layers)
    return AdapterBytes(
        attention=3 * spec.width * sum(widths) * itemsize,
        experts=3 * spec.width * spec.expert_width * num_experts * itemsize,
    )


def _added_bytes(
    shapes: Mapping[str, Shape], modules: Collection[str], spec: ModelSpec, itemsize: int
) -> AdapterBytes:
    """Returns the bytes of a LoRA's matrices of experts and MLPs. A has the padded rank of each;
    PEFT stacks the matrices of fused experts in two dimensions."""
    total = AdapterBytes()
    for name, shape in shapes.items():
        found = _LORA.fullmatch(name)
        if found is None or found["module"] not in modules:
            continue
        size, is_routed = math.prod(shape) * itemsize, _ROUTED in f"{found['module']}."
        if found["side"] == "A":
            is_fused = is_routed and len(shape) == 2 and _EXPERT.search(found["module"]) is None
            rank = shape[-2] // (spec.router.num_experts if is_fused else 1)
            size = size // max(1, rank) * padded_rank(rank)
        total += AdapterBytes(experts=size) if is_routed else AdapterBytes(attention=size)
    return total


def _changed_experts(modules: Collection[str], spec: ModelSpec) -> tuple[int, set[int]]:
    """Returns the number of routed experts that these modules belong to, and the layers of the
    other MLPs. Modules outside of layers do not count: loading refuses them later."""
    experts: set[tuple[int, int]] = set()
    mlps: set[int] = set()
    for module in modules:
        layer = _LAYER.search(module)
        key = int(layer[1]) if layer else spec.num_layers
        if key >= spec.num_layers:
            continue
        expert = _EXPERT.search(module)
        if _ROUTED not in f"{module}.":
            mlps.add(key)
        elif expert is not None:
            experts.add((key, int(expert[1])))
        else:  # all experts of the layer in one tensor
            experts |= {(key, number) for number in range(spec.router.num_experts)}
    return len(experts), mlps
