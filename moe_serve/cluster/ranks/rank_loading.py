"""Opens the model of a rank on its device, and reports when it has loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_serve.cache.model_identity import model_identity
from moe_serve.cluster.control.messages import Configure, Loaded
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import OpenedModel, device_of
from moe_serve.model.load.model_tensors import LoadProgress
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


def open_rank(configure: Configure, progress: LoadProgress) -> OpenedModel:
    """Opens the rank's checkpoint on its device, and sets torch's number of threads."""
    config, folder = configure.config.model, Path(configure.folder)
    device = rank_device(config)
    model = OpenedModel.open(folder, config, configure.num_threads, device, progress)
    model.set_torch_threads()
    return model


def loaded_message(
    model: OpenedModel, seconds: float, *, num_pages: int = 0, kv_bytes: int = 0
) -> Loaded:
    """Returns the message that the rank is ready, with its checkpoint's hash. Expert ranks have no
    pages."""
    return Loaded(
        weights_hash=model_identity(model.folder).hex(),
        report=model.report(num_pages=num_pages, kv_bytes=kv_bytes),
        load_seconds=seconds,
        gpu=gpu_of(model.loader.device),
    )
