"""Random weights and rows of an expert layer, and the least time that they can take.

T rows, K choices per row, R = T * K, D model width, F expert width, E experts here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.gpu.expert_layers import ExpertLayerSizes
from moe_kernels.interface.kernels import ExpertWeights

_WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights gate_up [E, 2F, D] with gate rows first, down [E, D, F], and biases [E, 2F] and
    [E, D] or None.
    """

    shape: ExpertLayerSizes
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def experts(self) -> list[ExpertWeights]:
        """Returns views of the same memory, one for each expert."""
        width = self.shape.expert_width
        experts = []
        for e in range(self.shape.num_local_experts):
            gate, up = self.gate_up[e].split(width)
            expert = ExpertWeights(gate, up, self.down[e])
            if self.gate_up_bias is not None and self.down_bias is not None:
                gate_bias, up_bias = self.gate_up_bias[e].split(width)
                expert = ExpertWeights(
                    gate, up, self.down[e], gate_bias, up_bias, self.down_bias[e]
                )
            experts.append(expert)
        return experts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """Rows x [T, D], ids [T, K] ascending in a row (int64), and weights [T, K] in fp32.

    `num_active` is the number of experts that at least one row chose.
    """

    x_TD: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    num_active: int


def make_weights(shape: ExpertLayerSizes, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        values = torch.empty(size, dtype=dtype, device=device)
        return values.normal_(std=_WEIGHT_SCALE, generator=generator)

    e, d, f = shape.num_local_experts, shape.width, shape.expert_width
    return LayerWeights(
        shape=shape,
        gate_up=random(e, 2 * f, d),
        down=random(e, d, f),
        gate_up_bias=random(e, 2 * f) if shape.has_bias else None,
        down_bias=random(e, d) if shape.has_bias else None,
    )


def make_rows(
    shape: ExpertLayerSizes, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> LayerRows:
    """Returns rows that choose their experts at random, all experts with the same probability."""
    generator = torch.Generator(device).manual_seed(num_tokens)
    num_rows = shape.num_rows(num_tokens)
    scores = torch.rand(num_rows, shape.num_local_experts, generator=generator, device=device)
    weights, ids = scores.topk(shape.num_choices)
    x = torch.randn(num_rows, shape.width, generator=generator, device=device)
    return LayerRows(
        x_TD=x.to(dtype),
        expert_ids_TK=ids.sort(-1).values,
        weights_TK=weights / weights.sum(-1, keepdim=True),
        num_active=int(ids.unique().numel()),
    )


def least_bytes(shape: ExpertLayerSizes, rows: LayerRows, weight_bytes: float) -> float:
    """Returns the bytes of activated experts, read once, of the rows and of fp32 results.

    `weight_bytes` is the size of one weight.
    """
    num_weights = rows.num_active * 3 * shape.width * shape.expert_width
    num_values = rows.x_TD.numel()
    return num_weights * weight_bytes + num_values * (rows.x_TD.element_size() + 4)


def operations(shape: ExpertLayerSizes, rows: LayerRows) -> float:
    """Returns two operations per weight and routed row."""
    return 6.0 * rows.expert_ids_TK.numel() * shape.width * shape.expert_width
