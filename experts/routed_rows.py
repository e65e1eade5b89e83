"""What the attention side sends to the expert side for one layer and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Made by the router; T rows, D model width, K choices. All on one device.

    `expert_ids_TK` ascends within a row, which fixes the order of the weighted sum.
    """

    x_TD: Tensor  # the model's dtype, normed
    expert_ids_TK: Tensor  # int64, global expert ids
    weights_TK: Tensor  # fp32
