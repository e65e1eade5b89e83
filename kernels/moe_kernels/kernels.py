"""What the runtime asks of a set of kernels. One set is chosen at load and passed down.

T rows, D model width, H query heads, Hkv key/value heads, E experts, K top-k. Whatever the set, a
row's result depends on that row alone (see docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_kernels.attention_shape import AttentionShape, QKNormWeights, RotaryTable, StepTokens


class Linear(Protocol):
    """x [T, K] -> x W^T + bias (+ residual) [T, N], in the weight's dtype."""

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor: ...


class ExpertBank(Protocol):
    """One layer's experts: rows, ids and weights -> the rows' weighted sum [T, D] in fp32."""

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate and up are [F, D], down is [D, F]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's keys and values, [pages, Hkv, page size, D] each."""

    keys: Tensor
    values: Tensor


class Kernels(Protocol):
    """A set of kernels for one device and dtype. `AttentionPlan` is the set's own type."""

    @property
    def name(self) -> str: ...

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """Make a linear layer; the weight may be repacked, and need not be kept by the caller."""
        ...

    def experts(self, experts: Sequence[ExpertWeights | None]) -> ExpertBank:
        """Make a layer's bank; None stands for an expert that lives elsewhere."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) rounded to x's dtype, times weight."""
        ...

    def plan_attention(self, step: StepTokens, shape: AttentionShape, device: torch.device) -> Any:
        """Work out once per step what every layer's attention needs."""
        ...

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        rotary: RotaryTable,
        positions: Tensor,
        kv_rows: Tensor,
        pages: KVPages,
        plan: Any,
        shape: AttentionShape,
    ) -> Tensor:
        """Norm, clip, rotate, store keys and values, attend: [T, (H + 2 Hkv) D] -> [T, H D].

        `qkv` may be overwritten. `kv_rows` [T * Hkv]: rows of the pages seen as [.., D].
        """
        ...

    def route(self, logits_TE: Tensor, top_k: int, is_renormalised: bool) -> tuple[Tensor, Tensor]:
        """Softmax over E in fp32, top-k -> ids (int64, ascending in a row) and weights (fp32)."""
        ...
