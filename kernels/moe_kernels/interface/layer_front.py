"""The first half of a layer as one call: all between two visits to the experts.

T rows, D model width, E experts, K choices per row, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moe_kernels.interface.attention_shape import AttentionShape, QKNormWeights, RotaryTable
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.interface.routing import RouterShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFrontParts:
    """The weights of a layer's grouped-query attention and router. In a layer without
    routed experts `router`, its shape and its bias are None."""

    attention_norm: Tensor
    qkv: Any  # a Linear of the same kernels
    qk_norm: QKNormWeights | None
    sinks_H: Tensor | None
    rotary: RotaryTable
    shape: AttentionShape
    output: Any  # likewise
    moe_norm: Tensor
    norm_eps: float
    router: Any | None  # a RouterLinear of the same kernels
    router_shape: RouterShape | None
    selection_bias_E: Tensor | None


@dataclass(frozen=True, slots=True)
class FrontResult:
    """The residual stream after attention, the normed rows, and what the router chose for them."""

    hidden_TD: Tensor
    x_TD: Tensor
    expert_ids_TK: Tensor | None
    weights_TK: Tensor | None


class LayerFront(Protocol):
    """Norm, attention, residual, norm, router: all between two visits to the experts, in a call."""

    def __call__(
        self,
        hidden_TD: Tensor,
        positions: Tensor,
        kv_rows: Tensor,
        pages: KVPages,
        plan: Any,
        adapters: Any = None,  # of the rows, from AdapterKernels.rows
        layer: int = 0,  # its number, for adapters
    ) -> FrontResult: ...
