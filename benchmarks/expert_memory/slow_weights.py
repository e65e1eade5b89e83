"""A checkpoint on a slower disk than this machine's: every read while serving waits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_serve.model.checkpoint.checkpoint import Checkpoint, Shape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.load.weight_reader import OpenWeights, WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The storage of the experts. Reads of two threads overlap, as on a disk with a queue."""

    latency_s: float = 0.0  # of each tensor
    bytes_per_s: float = float("inf")

    def __str__(self) -> str:
        if not self.latency_s and self.bytes_per_s == float("inf"):
            return "page cache"
        return f"{self.latency_s * 1e6:.0f} us a tensor, {self.bytes_per_s / 1e9:g} GB/s"

    def wait(self, num_bytes: int) -> None:
        seconds = self.latency_s + num_bytes / self.bytes_per_s
        if seconds:
            time.sleep(seconds)


class SlowReader(WeightReader):
    """Slow only where experts are read while requests run; loading is as ever."""

    def __init__(self, folder: Path, config: HFConfig, tier: Tier, *, is_copying: bool) -> None:
        super().__init__(Checkpoint(folder, is_copying=is_copying), config)
        self._arguments: tuple[Any, ...] = (folder, config, tier)
        self._tier = tier if is_copying else Tier()

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        weight = super().read(name, shape, dtype, expert)
        self._tier.wait(weight.nbytes)
        return weight

    def copying(self) -> SlowReader:
        return SlowReader(*self._arguments, is_copying=True)


def slow_weights(tier: Tier) -> OpenWeights:
    """For `build_engine`."""

    def open_weights(folder: Path, config: HFConfig) -> SlowReader:
        return SlowReader(folder, config, tier, is_copying=False)

    return open_weights
