"""The device that a rank computes on."""

from __future__ import annotations

import torch

from moe_serve.config.sections import ModelConfig
from moe_serve.engine.build import device_of


def rank_device(config: ModelConfig) -> torch.device:
    """Before anything is loaded. A rank sees one GPU, which whoever started it has chosen
    (launch/devices.py); if it sees more, it takes the first. Raises ConfigError."""
    device = device_of(config)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    return device
