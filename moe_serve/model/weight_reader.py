"""Reads logical weights of one checkpoint, whatever format they are stored in."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint import Checkpoint
from moe_serve.model.hf_config import HFConfig


class WeightReader:
    """`expect` what will be read, then `read` it (from several threads at once, if you like)."""

    def __init__(self, checkpoint: Checkpoint, config: HFConfig) -> None:
        self._checkpoint = checkpoint

    @property
    def format_name(self) -> str:
        return "plain"

    def has(self, name: str) -> bool:
        try:
            self._checkpoint._path(name)
        except CheckpointError:
            return False
        return True

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        self._checkpoint.check({name: shape})

    def read(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        tensor = self._checkpoint.tensor(name, dtype)
        return tensor if expert is None else tensor[expert]

    def done(self, name: str, expert: int | None = None) -> None:
        """The caller has copied it."""
