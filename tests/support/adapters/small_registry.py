"""A registry whose adapters need no model: their weights are a number of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.model.stage.adapter_rows import AdapterWeights
from tests.support.adapters.adapter_folders import write_peft

BYTES = 100  # of each adapter


def write_small(folder: Path, number: int = 0) -> Path:
    """Writes a folder whose content depends on a number."""
    matrix = torch.full((1, 1), float(number))
    return write_peft(folder, {"base_model.model.x.lora_A.weight": matrix}, r=1)


def small_registry(**config: Any) -> AdapterRegistry:
    return AdapterRegistry(AdapterConfig(is_enabled=True, **config), _build)


def _build(files: AdapterFiles) -> AdapterWeights:
    return AdapterWeights(digest=files.digest, layers=(), num_bytes=BYTES, kind="lora", rank=1)
