"""The device of a rank, and its report once it has loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_serve.cache.model_identity import model_identity
from moe_serve.cluster.control.messages import Configure, Loaded
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.build import device_of
from moe_serve.model.load.loader import ModelLoader
from moe_serve.pipeline.links.nccl_link import gpu_of


def rank_device(config: ModelConfig) -> torch.device:
    """Chooses the device before anything is loaded; raises ConfigError.

    A rank sees one GPU, which its starter has chosen (members/rank_starter.py). If it sees more, it
    takes the first.
    """
    device = device_of(config)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    return device


def load_report(
    loader: ModelLoader,
    configure: Configure,
    seconds: float,
    *,
    num_pages: int = 0,
    kv_bytes: int = 0,
) -> Loaded:
    """Returns the message that the rank is ready, with its checkpoint's hash. Expert ranks have no
    pages."""
    return Loaded(
        weights_hash=model_identity(Path(configure.folder)).hex(),
        num_pages=num_pages,
        kv_bytes=kv_bytes,
        kernels=loader.kernels.name,
        dtype=str(loader.dtype).removeprefix("torch."),
        device=str(loader.device),
        weight_format=loader.weight_format,
        expert_weights=loader.expert_weights,
        load_seconds=seconds,
        gpu=gpu_of(loader.device),
    )
