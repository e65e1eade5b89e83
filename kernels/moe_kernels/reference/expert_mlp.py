"""The expert stage's arithmetic: rows sorted by expert, one SwiGLU MLP per activated expert.

T rows, K choices per row, E experts here, D model width, F expert width, R = T * K routed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights, GatedActivation
from moe_kernels.interface.quantised_matrix import LowBitProducts, Weight, as_floats
from moe_kernels.reference.linear import make_linear
from moe_kernels.reference.low_bit_linear import (
    AnyLinear,
    Int8Linear,
    QuantisedLinear,
    made_linear,
)

_SWIGLU = GatedActivation()
# C: doubles from 2^16 to 2^17 are 2^-36 apart, so t + C - C is t's nearest multiple (ties: even).
# The same constant: kGrid in cpu/experts.cpp, GRID in gpu/grouped_gemm/kernel.py.
_GRID = 1.5 * 2**16


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """One expert, ready to run: down(activation(gate(x), up(x)))."""

    gate: AnyLinear
    up: AnyLinear
    down: AnyLinear
    activation: GatedActivation = _SWIGLU

    @classmethod
    def from_weights(
        cls,
        weights: ExpertWeights,
        activation: GatedActivation = _SWIGLU,
        dtype: torch.dtype = torch.float32,
    ) -> ExpertMLP:
        """Floats; `dtype`: what quantised matrices become."""
        return cls(
            make_linear(as_floats(weights.gate, dtype), weights.gate_bias),
            make_linear(as_floats(weights.up, dtype), weights.up_bias),
            make_linear(as_floats(weights.down, dtype), weights.down_bias),
            activation,
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate, up = self.gate, self.up
        if self.activation == _SWIGLU and not isinstance(gate, Int8Linear | QuantisedLinear):
            assert not isinstance(up, Int8Linear | QuantisedLinear), "gate and up are alike"
            return self.down(up.times(x_TD, gate.silu(x_TD)))
        hidden = activate(self.gate(x_TD).float(), self.up(x_TD).float(), self.activation)
        return self.down(hidden.to(x_TD.dtype))


@dataclass(frozen=True, slots=True)
class QuantisedMLP:
    """One expert in few bits, dequantised in every call: slower than ExpertMLP, and much smaller.

    Its results have the bits of an ExpertMLP of the same matrices, dequantised at load.
    """

    weights: ExpertWeights
    activation: GatedActivation = _SWIGLU

    def __call__(self, x_TD: Tensor) -> Tensor:
        return ExpertMLP.from_weights(self.weights, self.activation, x_TD.dtype)(x_TD)


class AnyMLP(Protocol):
    """One expert, ready to run: rows [T, D] -> [T, D] in their dtype."""

    def __call__(self, x_TD: Tensor, /) -> Tensor: ...


def made_mlp(
    weights: ExpertWeights, activation: GatedActivation, products: LowBitProducts = "exact"
) -> ExpertMLP | QuantisedMLP:
    """Prepares an expert to run; it keeps copies, never the tensors of `weights`."""
    matrices = (weights.gate, weights.up, weights.down)
    if all(isinstance(matrix, Tensor) for matrix in matrices):
        return ExpertMLP.from_weights(weights, activation)
    copied = _copied(weights)
    if products == "exact":
        return QuantisedMLP(copied, activation)
    return ExpertMLP(
        made_linear(copied.gate, copied.gate_bias, products),
        made_linear(copied.up, copied.up_bias, products),
        made_linear(copied.down, copied.down_bias, products),
        activation,
    )


def _copied(weights: ExpertWeights) -> ExpertWeights:
    biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
    return ExpertWeights(
        weights.gate.clone(),
        weights.up.clone(),
        weights.down.clone(),
        *(None if bias is None else bias.clone() for bias in biases),
    )


def activate(gate_TF: Tensor, up_TF: Tensor, activation: GatedActivation) -> Tensor:
    """From operations whose result does not depend on a value's position (torch.sigmoid's may)."""
    if activation.limit is not None:
        gate_TF = gate_TF.clamp(max=activation.limit)
        up_TF = up_TF.clamp(-activation.limit, activation.limit)
    glu_TF = gate_TF / (1.0 + torch.exp(-activation.alpha * gate_TF))
    return glu_TF * (up_TF + activation.up_offset)


def routed_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor] | None],
) -> Tensor:
    """Weighted sum of each row's experts, [T, D] in fp64 (see combine_choices).

    A choice of -1 lives elsewhere and adds nothing; `experts[e]` may be None for an expert that no
    row chose.

    Worked example, T = 2, K = 2: ids [[0, 2], [-1, 2]] -> order [2, 0, 1, 3], rows [1, 0, 0, 1],
    counts [1, 1, 0, 2] of elsewhere and of experts 0, 1, 2: expert 0 gets row 0, expert 2 both.
    """
    num_rows, top_k = expert_ids_TK.shape
    flat_R = expert_ids_TK.reshape(-1)
    if num_rows and top_k == 1 and len(experts) == 1 and not flat_R.any():
        (only,) = experts  # a shared expert or a dense MLP: there is nothing to sort
        assert only is not None, "rows were sent for expert 0, which this rank does not hold"
        return combine_choices(only(x_TD)[:, None], weights_TK)
    order_R = torch.argsort(flat_R, stable=True)
    num_elsewhere, *counts = torch.bincount(flat_R + 1, minlength=len(experts) + 1).tolist()
    sorted_RD = x_TD.index_select(0, order_R // top_k)
    outputs, start = [x_TD.new_zeros(num_elsewhere, x_TD.shape[1])], num_elsewhere
    for expert_id, count in enumerate(counts):
        if count:
            expert = experts[expert_id]
            assert expert is not None, (
                f"rows were sent for expert {expert_id}, which this rank does not hold"
            )
            outputs.append(expert(sorted_RD[start : start + count]))
            start += count
    y_RD = torch.cat(outputs)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    y_TKD = y_RD.index_select(0, inverse_R).view(num_rows, top_k, x_TD.shape[1])
    return combine_choices(y_TKD, weights_TK.where(expert_ids_TK >= 0, 0.0))


def combine_choices(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """sum_k weights[:, k] * y[:, k] in fp64, the same in any order and grouping of k.

    A product of two fp32 is exact in fp64. Each is rounded to a multiple of 2^-36: C + t lies
    where a double's spacing is just that, for |t| < 2^15. Such multiples add up without rounding
    below 2^17. Beyond, doubles round as ever, and an order may show. NaN and infinity stay.
    """
    out_TD = torch.zeros_like(y_TKD[:, 0], dtype=torch.float64)
    for k in range(y_TKD.shape[1]):
        term_TD = y_TKD[:, k].double() * weights_TK[:, k : k + 1].double()
        out_TD += term_TD.add_(_GRID).sub_(_GRID)
    return out_TD


def routed_experts_reference(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    weights: Sequence[ExpertWeights],
    activation: GatedActivation = _SWIGLU,
) -> Tensor:
    """The definition, in float64 and without sorting."""
    x_TD, out_TD = x_TD.double(), torch.zeros_like(x_TD, dtype=torch.float64)
    for t, (ids, row_weights) in enumerate(
        zip(expert_ids_TK.tolist(), weights_TK.tolist(), strict=True)
    ):
        for expert_id, weight in zip(ids, row_weights, strict=True):
            e = weights[expert_id]
            gate, up = (
                F.linear(x_TD[t], _double(w), None if b is None else b.double())
                for w, b in ((e.gate, e.gate_bias), (e.up, e.up_bias))
            )
            hidden = activate(gate, up, activation)
            down_bias = None if e.down_bias is None else e.down_bias.double()
            out_TD[t] += weight * F.linear(hidden, _double(e.down), down_bias)
    return out_TD


def _double(weight: Weight) -> Tensor:
    return as_floats(weight, torch.float64).double()
