"""Torch kernels through which gradients flow, to fit the scales of signs: whole sequences, in fp32,
and plain operations instead of packed weights. Keys and values are not kept in pages.

The scales of a `SignMatrix` are indices into `FittedScales` here, so that a matrix has the fitted
scales at the time of a call. T rows, N outputs, K inputs, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.interface.adapters import Rest, no_rest
from moe_kernels.interface.attention_shape import AttentionShape, StepRows
from moe_kernels.interface.kernels import (
    AttentionCall,
    ExpertBank,
    ExpertWeights,
    GatedActivation,
    Linear,
)
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix
from moe_kernels.reference.torch_kernels import TorchExperts, TorchKernels


@dataclass(frozen=True, slots=True)
class FittedScales:
    """The scales of all matrices: their initial values, and the fitted factors. Index 0 is for
    matrices without signs, whose scale is 0."""

    first: Tensor
    factors: Tensor  # a leaf of the graph

    def at(self, places_N: Tensor) -> Tensor:
        """Returns the present values of some scales."""
        return self.first[places_N] * self.factors[places_N]


@dataclass(frozen=True, slots=True)
class FittedSigns:
    """Signs [N, K] as int8, and the indices [N] of the rows' scales."""

    signs_NK: Tensor
    places_N: Tensor
    scales: FittedScales
    bias_N: Tensor | None

    @classmethod
    def of(cls, added: SignMatrix, scales: FittedScales) -> FittedSigns:
        signs, places = added.signs().to(torch.int8), added.every_scale().long()
        return cls(signs, places, scales, added.bias_N)

    def weight(self) -> Tensor:
        """Returns the present addition to the matrix."""
        return self.scales.at(self.places_N)[:, None] * self.signs_NK.float()


@dataclass(frozen=True, slots=True)
class GradientLinear:
    """Implements Linear and RouterLinear."""

    weight_NK: Tensor
    bias_N: Tensor | None = None
    signs: FittedSigns | None = None

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        weight_NK, bias_N = self.weight_NK, self.bias_N
        if self.signs is not None:
            weight_NK = weight_NK + self.signs.weight()
            if self.signs.bias_N is not None:
                bias_N = self.signs.bias_N if bias_N is None else bias_N + self.signs.bias_N
        out_TN = F.linear(x_TK, weight_NK, bias_N)
        return out_TN if residual_TN is None else residual_TN + out_TN

    def with_signs(self, added: SignMatrix | None, scales: FittedScales) -> GradientLinear:
        """Returns the layer with an addition."""
        if added is None:
            return self
        return GradientLinear(self.weight_NK, self.bias_N, FittedSigns.of(added, scales))


@dataclass(frozen=True, slots=True)
class _HeadLinear:
    """Implements HeadLinear."""

    weight_HNK: Tensor

    def __call__(self, x_THK: Tensor) -> Tensor:
        return torch.einsum("thk,hnk->thn", x_THK, self.weight_HNK)


@dataclass(frozen=True, slots=True)
class _MLP:
    """One expert."""

    gate: GradientLinear
    up: GradientLinear
    down: GradientLinear
    activation: GatedActivation

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate, up, limit = self.gate(x_TD), self.up(x_TD), self.activation.limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * torch.sigmoid(self.activation.alpha * gate)
        return self.down(hidden * (up + self.activation.up_offset))


class _ExpertSigns:
    """The additions to a layer's experts."""

    def __init__(self, added: Mapping[int, SignedExpert], scales: FittedScales) -> None:
        self._added, self._scales = dict(added), scales
        self._made: dict[int, _MLP] = {}
        self.num_bytes = 0

    def of(self, experts: Sequence[_MLP | None]) -> list[_MLP | None]:
        """Returns a bank's experts with the additions, which are made once."""
        for number, expert in enumerate(experts):
            added = self._added.get(number)
            if expert is not None and number not in self._made:
                self._made[number] = expert if added is None else self._signed(expert, added)
        return [self._made.get(number) for number in range(len(experts))]

    def _signed(self, expert: _MLP, added: SignedExpert) -> _MLP:
        parts = ((expert.gate, added.gate), (expert.up, added.up), (expert.down, added.down))
        gate, up, down = (part.with_signs(more, self._scales) for part, more in parts)
        return _MLP(gate, up, down, expert.activation)


class GradientKernels(TorchKernels):
    """Implements Kernels for whole sequences."""

    def __init__(self, scales: FittedScales) -> None:
        super().__init__("torch with gradients")
        self._scales = scales

    def linear(self, weight_NK: Any, bias_N: Tensor | None = None) -> Any:
        assert isinstance(weight_NK, Tensor), "gradients flow through floats"
        bias_N = None if bias_N is None else bias_N.float().clone()
        return GradientLinear(weight_NK.float().clone(), bias_N)

    def router_linear(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> Any:
        return self.linear(weight_ED, bias_E)

    def head_linear(self, weight_HNK: Tensor) -> Any:
        return _HeadLinear(weight_HNK.float().clone())

    def experts(
        self, experts: Sequence[ExpertWeights | None], activation: GatedActivation
    ) -> ExpertBank:
        made: list[Any] = [None if e is None else self._mlp(e, activation) for e in experts]
        return TorchExperts(made)

    def _mlp(self, e: ExpertWeights, activation: GatedActivation) -> _MLP:
        gate, up = self.linear(e.gate, e.gate_bias), self.linear(e.up, e.up_bias)
        return _MLP(gate, up, self.linear(e.down, e.down_bias), activation)

    def signed_linear(self, base: Linear, added: SignMatrix) -> Any:
        assert isinstance(base, GradientLinear), f"a layer of these kernels, not {type(base)}"
        return base.with_signs(added, self._scales)

    def expert_signs(
        self, added: Mapping[int, SignedExpert], is_changed_E: Tensor, rest: Rest = no_rest
    ) -> Any:
        return _ExpertSigns(added, self._scales)

    def plan_attention(self, step: StepRows, shape: AttentionShape, device: torch.device) -> Any:
        """Returns a mask [t, t] for each sequence: the keys that a token does not see."""
        assert not step.query_starts.any(), "whole sequences"
        return [_hidden(int(count), shape).to(device) for count in step.query_lens]

    def over_keys(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGV: Tensor | None,
        call: AttentionCall[Any],
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See TorchKernels.over_keys."""
        outputs, first = [], 0
        values = k_TGD[..., : call.pages.values.shape[-1]] if v_TGV is None else v_TGV
        for hidden_tt in call.plan:
            own = slice(first, first + len(hidden_tt))
            first = own.stop
            outputs.append(
                _attended(q_THD[own] * scale, k_TGD[own], values[own], hidden_tt, sinks_H)
            )
        return torch.cat(outputs)


def _hidden(count: int, shape: AttentionShape) -> Tensor:
    keys, queries = torch.arange(count)[None], torch.arange(count)[:, None]
    hidden = keys > queries
    if shape.sliding_window is not None:
        hidden |= keys <= queries - shape.sliding_window
    if shape.chunk is not None:
        hidden |= keys < queries // shape.chunk * shape.chunk
    return hidden


def _attended(
    q_tHD: Tensor, k_tGD: Tensor, v_tGV: Tensor, hidden_tt: Tensor, sinks_H: Tensor | None
) -> Tensor:
    group = q_tHD.shape[1] // k_tGD.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k_tGD, v_tGV))
    scores = torch.einsum("qhd,khd->hqk", q_tHD, keys)
    scores = scores.masked_fill(hidden_tt, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)
