"""Small checkpoints of stored tensors, and readers of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_serve.model.checkpoint.checkpoint import Checkpoint
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.load.weight_reader import WeightReader


@pytest.fixture()
def reader_of(tmp_path: Path) -> Callable[..., WeightReader]:
    """Returns a function (tensors, quantization_config) -> a reader of a checkpoint with them."""

    def make(
        tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
    ) -> WeightReader:
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
        config = HFConfig({"quantization_config": quantization}, "config.json")
        return WeightReader(Checkpoint(tmp_path), config)

    return make
