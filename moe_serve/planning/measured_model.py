"""The model that a calibration measures: both stages of a checkpoint in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from experts.expert_stage import ExpertStage
from moe_kernels.interface.kernels import Kernels
from moe_kernels.kernel_choice import default_num_threads
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import CacheConfig
from moe_serve.errors import ConfigError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention_stage import AttentionStage

_MAX_LAYERS = 8  # measured of one kind; they take turns, as in a step, so no layer stays cached
_CACHE_BYTES = 2**30
_CACHE_SHARE = 0.2  # of the free memory


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with one shape of attention, all sparse or all dense."""

    name: str
    layers: tuple[int, ...]
    is_sparse: bool

    @property
    def measured(self) -> tuple[int, ...]:
        return self.layers[:_MAX_LAYERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """`max_context` is the longest context that may be measured. Bytes are those of the weights as
    loaded."""

    folder: Path
    spec: ModelSpec
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    num_threads: int
    attention: AttentionStage
    experts: ExpertStage
    cache: KVCache
    max_context: int

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        found: dict[tuple[object, bool], list[int]] = {}
        for index, layer in enumerate(self.spec.layers):
            found.setdefault((layer.attention, layer.is_sparse), []).append(index)
        return tuple(
            LayerKind(f"{'sparse' if is_sparse else 'dense'} {i}", tuple(layers), is_sparse)
            for i, ((_, is_sparse), layers) in enumerate(found.items())
        )

    @property
    def num_cached_tokens(self) -> int:
        return self.cache.num_pages * self.cache.page_size


def load_measured_model(folder: Path, device_name: str, num_threads: int | None) -> MeasuredModel:
    """Loads both stages, and sets torch's number of threads in this process, as the engine does.

    Raises ConfigError if there is no such device, CheckpointError as the server does.
    """
    device = _device(device_name)
    loader = ModelLoader(folder, device=device, num_threads=num_threads)
    threads = num_threads or default_num_threads()
    torch.set_num_threads(1 if loader.kernels.has_own_threads else threads)
    spec = loader.spec
    experts = loader.expert_stage()
    max_context = min(spec.max_positions, 16384)
    attention = loader.attention_stage(max_context)
    page_size = CacheConfig().page_size
    page_bytes = page_size * spec.kv_bytes_per_token(loader.dtype.itemsize)
    num_pages = _num_pages(page_bytes, device)
    return MeasuredModel(
        folder=folder,
        spec=spec,
        kernels=loader.kernels,
        dtype=loader.dtype,
        device=device,
        num_threads=threads,
        attention=attention,
        experts=experts,
        cache=KVCache(spec, num_pages, page_size, loader.dtype, device),
        max_context=min(max_context, num_pages * page_size),
    )


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA GPU here: use 'cpu' or 'auto'."
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_cuda) else "cpu")


def _num_pages(page_bytes: int, device: torch.device) -> int:
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    else:
        free = int(psutil.virtual_memory().available)
    budget = min(_CACHE_BYTES, int(free * _CACHE_SHARE))
    return max(1, budget // page_bytes)
