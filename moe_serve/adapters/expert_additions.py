"""Makes the additions to the experts of a layer from the matrices of a LoRA.

N outputs, K inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_kernels.interface.adapters import Addition, ExpertAddition
from moe_serve.adapters.peft_lora import LowRankMatrices


class AdditionMaker:
    """Converts matrices to the model's dtype. A matrix that several experts share is converted
    once, and stays shared."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._converted: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def expert(self, changes: Mapping[str, LowRankMatrices]) -> ExpertAddition:
        """Returns the additions to one expert, of which some parts may not be changed."""
        return ExpertAddition(**{part: self._addition(each) for part, each in split(changes)})

    def _addition(self, each: LowRankMatrices) -> Addition:
        return Addition(self._like(each.a_RK, 1.0), self._like(each.b_NR, each.scale))

    def _like(self, matrix: Tensor, scale: float) -> Tensor:
        key = (matrix.data_ptr(), matrix.shape, matrix.stride(), scale)
        if key not in self._converted:
            made = (matrix.to(self._device).float() * scale).to(self._dtype)
            self._converted[key] = (matrix, made)  # its address stays in use, too
        return self._converted[key][1]


def split(changes: Mapping[str, LowRankMatrices]) -> list[tuple[str, LowRankMatrices]]:
    """Returns the changes by part, with gate and up apart; they share A then."""
    found = []
    for part, each in changes.items():
        if part != "gate_up":
            found.append((part, each))
            continue
        for name, b_NR in zip(("gate", "up"), each.b_NR.chunk(2), strict=True):
            found.append((name, LowRankMatrices(a_RK=each.a_RK, b_NR=b_NR, scale=each.scale)))
    return found
