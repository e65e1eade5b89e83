"""Where results of a device lie: `benchmarks/results/<device>/`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from harness.environment import describe_environment

RESULTS = Path(__file__).resolve().parents[1] / "results"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return describe_environment()["cpu"]


def device_folder(device: torch.device) -> str:
    """The device's name as a folder's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
