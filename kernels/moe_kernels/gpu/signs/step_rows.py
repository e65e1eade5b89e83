"""The adapters of a step's rows on a GPU: the signs of all BitDelta adapters in one launch for each
linear layer; what adapters have in place of the base model's parts, adapter by adapter.

T rows, A adapters of a step, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.gpu.align.api import Alignment
from moe_kernels.gpu.router.api import route
from moe_kernels.gpu.rows.api import rms_norm
from moe_kernels.gpu.signs.api import GpuSignedLinear, add_signs, align_tiles
from moe_kernels.interface.adapters import (
    AdapterParts,
    ExpertAddition,
    LayerTune,
    ModelTune,
    Rest,
    no_rest,
)
from moe_kernels.interface.routing import RouterShape

Norms = tuple[Tensor | None, Tensor | None]  # of queries and keys; of latents, and None


@dataclass(frozen=True, slots=True)
class TunedPlan:
    """A plan of attention, and the rows whose queries and keys have other norms."""

    plan: Any
    groups: Sequence[tuple[Tensor, Norms]]


def untuned(plan: Any) -> tuple[Any, Sequence[tuple[Tensor, Norms]]]:
    """Returns a plan, and the groups of rows with norms of their own."""
    return (plan.plan, plan.groups) if isinstance(plan, TunedPlan) else (plan, ())


class GpuStepRows:
    """Implements AdaptedRows."""

    def __init__(
        self,
        index_T: NDArray[np.int64],
        adapters: Sequence[Sequence[AdapterParts]],
        device: torch.device,
    ) -> None:
        self._adapters, self._device = adapters, device
        self._index_T = torch.from_numpy(index_T).to(device)
        self._rows = [
            torch.from_numpy(np.flatnonzero(index_T == number)).to(device)
            for number in range(len(adapters))
        ]
        self._alignments: dict[tuple[bool, ...], Alignment] = {}

    def _tunes(self, layer: int) -> list[tuple[Tensor, LayerTune]]:
        """Returns the rows of each fine-tune."""
        parts = [adapter[layer] for adapter in self._adapters]
        return [
            (rows, each.tune)
            for rows, each in zip(self._rows, parts, strict=True)
            if each.tune is not None
        ]

    def add(self, layer: int, linear: str, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        y_TN, signs = y_TN.contiguous(), list[GpuSignedLinear | None]()
        for rows, adapter in zip(self._rows, self._adapters, strict=True):
            parts = adapter[layer]
            low_rank = parts.linears.get(linear)
            if low_rank is not None:
                own = low_rank.added(x_TK.index_select(0, rows), y_TN.index_select(0, rows))
                y_TN.index_copy_(0, rows, own)
            signs.append(None if parts.tune is None else parts.tune.signs.get(linear))
        if any(each is not None for each in signs):
            add_signs(signs, x_TK, y_TN, self._aligned(tuple(each is not None for each in signs)))
        return y_TN

    def _aligned(self, has_signs: tuple[bool, ...]) -> Alignment:
        """Groups the rows by adapter, those of adapters with signs."""
        if has_signs not in self._alignments:
            is_signed_A = torch.tensor([*has_signs, False], device=self._device)  # of -1: the last
            ids_T = torch.where(is_signed_A[self._index_T], self._index_T, -1)
            self._alignments[has_signs] = align_tiles(ids_T[:, None], len(has_signs))
        return self._alignments[has_signs]

    def normed(self, layer: int, norm: str, x_TD: Tensor, y_TD: Tensor, eps: float) -> Tensor:
        for rows, tune in self._tunes(layer):
            if norm in tune.norms:
                own = rms_norm(x_TD.index_select(0, rows), tune.norms[norm], eps)
                y_TD.index_copy_(0, rows, own)
        return y_TD

    def lifted(self, layer: int, up: str, x_THK: Tensor, y_THN: Tensor) -> Tensor:
        for rows, tune in self._tunes(layer):
            if up in tune.heads:
                y_THN.index_copy_(0, rows, tune.heads[up](x_THK.index_select(0, rows)))
        return y_THN

    def planned(self, layer: int, plan: Any, norms: Norms, sinks_H: Tensor | None) -> Any:
        groups = [
            (
                rows,
                (
                    norms[0] if tune.q_norm is None else tune.q_norm,
                    norms[1] if tune.k_norm is None else tune.k_norm,
                ),
            )
            for rows, tune in self._tunes(layer)
            if tune.q_norm is not None or tune.k_norm is not None
        ]
        return TunedPlan(plan, groups) if groups else plan

    def routed(
        self, layer: int, shape: RouterShape, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> None:
        for rows, tune in self._tunes(layer):
            if tune.router is not None:
                logits_RE = tune.router(x_TD.index_select(0, rows))
                own = route(logits_RE, shape, tune.selection_bias_E, has_counts=False)
                ids_TK.index_copy_(0, rows, own.ids_TK)
                weights_TK.index_copy_(0, rows, own.weights_TK)


class GpuAdapterKernels:
    """Implements AdapterKernels. Rows of a fine-tune with its own sinks pass its own stage."""

    adds_to_experts = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def expert_additions(
        self,
        additions: Mapping[int, ExpertAddition],
        is_changed_E: Tensor,
        rest: Rest = no_rest,
    ) -> Any:
        raise AssertionError("a LoRA of experts is merged into copies of these")

    def adapter(
        self, layers: Sequence[AdapterParts], model: ModelTune | None = None
    ) -> Sequence[AdapterParts] | None:
        tunes = [each.tune for each in layers if each.tune is not None]
        return None if any(each.sinks_H is not None for each in tunes) else tuple(layers)

    def rows(
        self, index_T: NDArray[np.int64], adapters: Sequence[Sequence[AdapterParts]]
    ) -> GpuStepRows:
        return GpuStepRows(index_T, adapters, self._device)
