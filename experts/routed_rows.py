"""The rows that the attention side sends to the expert side for one layer and one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Routed rows, made by the router: T rows, D model width, K choices. All tensors are on one
    device.

    `expert_ids_TK` ascends within a row, which fixes the order of the weighted sum.
    """

    x_TD: Tensor  # the model's dtype, normalised
    expert_ids_TK: Tensor  # int64, global expert ids
    weights_TK: Tensor  # fp32
