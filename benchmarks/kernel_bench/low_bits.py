"""Our grouped products with quantised weights, on a GPU: the bf16 weights rounded to each
format.
"""

from __future__ import annotations

from functools import partial

import torch

from kernel_bench.expert_contestants import ExpertContestant, Layer
from kernel_bench.expert_work import LayerWeights
from moe_kernels.gpu.grouped_gemm import pack
from moe_kernels.gpu.grouped_gemm.api import chip_of, grouped_experts
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.heuristics import WeightFormat

_GROUPS: dict[WeightFormat, int] = {"fp8_block": 128, "int8": 0, "int4": 128, "mxfp4": 32}


def low_bit_contestants(device: torch.device) -> list[ExpertContestant]:
    """Returns one implementation per format; tile sizes follow the batch, as if the self-check
    passes.
    """
    return [
        ExpertContestant(name=weight_format, make=partial(_make, device, weight_format))
        for weight_format in _GROUPS
    ]


def _make(device: torch.device, weight_format: WeightFormat, weights: LayerWeights) -> Layer:
    group = _GROUPS[weight_format]
    experts = GroupedExperts(
        gate_up=pack.quantised(weights.gate_up, weight_format, group, 2),
        down=pack.quantised(weights.down, weight_format, group, 1),
        activation=weights.shape.activation,
        gate_up_bias=weights.gate_up_bias,
        down_bias=weights.down_bias,
    )
    chip = chip_of(device, has_equal_tiles=True)
    return lambda rows: grouped_experts(
        rows.x_TD, rows.expert_ids_TK, rows.weights_TK, experts, chip
    )
