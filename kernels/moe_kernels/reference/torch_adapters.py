"""Adapters in plain torch: an expert with additions is an MLP of its own over the same weights.

T rows, R of them with one adapter, K choices, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.adapters import (
    AdaptedRows,
    AdapterParts,
    Addition,
    ExpertAddition,
    ModelTune,
    Rest,
    RowAdditions,
    no_rest,
)
from moe_kernels.reference.expert_mlp import (
    AnyMLP,
    ExpertMLP,
    QuantisedMLP,
    activate,
    routed_experts,
)
from moe_kernels.reference.linear import FastLinear, make_linear


@dataclass(frozen=True, slots=True)
class _LowRank:
    a: FastLinear
    b: FastLinear

    def __call__(self, x_RK: Tensor) -> Tensor:
        return self.b(self.a(x_RK)).float()


@dataclass(frozen=True, slots=True)
class AddedMLP:
    """An expert with additions: sums of both products, before the activation and at the end."""

    base: ExpertMLP | QuantisedMLP
    parts: Mapping[str, _LowRank]

    def __call__(self, x_RD: Tensor) -> Tensor:
        base = self.base
        if isinstance(base, QuantisedMLP):
            base = ExpertMLP.from_weights(base.weights, base.activation, x_RD.dtype)
        gate, up = self._sum("gate", base.gate(x_RD), x_RD), self._sum("up", base.up(x_RD), x_RD)
        hidden_RF = activate(gate, up, base.activation).to(x_RD.dtype)
        return self._sum("down", base.down(hidden_RF), hidden_RF).to(x_RD.dtype)

    def _sum(self, part: str, y_RN: Tensor, x_RK: Tensor) -> Tensor:
        added = self.parts.get(part)
        return y_RN.float() if added is None else y_RN.float() + added(x_RK)


class TorchExpertAdditions:
    """The additions to a layer's experts."""

    def __init__(self, additions: Mapping[int, ExpertAddition], is_changed_E: Tensor) -> None:
        self._is_changed = is_changed_E.tolist()
        self._added = {expert: _linears(each) for expert, each in additions.items()}
        parts = [p for e in additions.values() for p in (e.gate, e.up, e.down) if p is not None]
        self.num_bytes = sum(each.a_RK.nbytes + each.b_NR.nbytes for each in parts)

    def of(self, experts: Sequence[AnyMLP | None]) -> list[AnyMLP | None]:
        """Returns the experts of a bank with their additions.

        An expert that the adapter changes is None if this process does not hold its addition.
        """
        return [self._changed(*item) for item in enumerate(experts)]

    def _changed(self, expert: int, base: AnyMLP | None) -> AnyMLP | None:
        if base is None or not self._is_changed[expert]:
            return base
        parts = self._added.get(expert)
        assert isinstance(base, ExpertMLP | QuantisedMLP), "an expert of the base model"
        return None if parts is None else AddedMLP(base, parts)


def _linears(each: ExpertAddition) -> Mapping[str, _LowRank]:
    parts: dict[str, Addition | None] = {"gate": each.gate, "up": each.up, "down": each.down}
    return {
        name: _LowRank(make_linear(part.a_RK), make_linear(part.b_NR))
        for name, part in parts.items()
        if part is not None
    }


def added_sums(
    experts: Sequence[AnyMLP | None],
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    additions: RowAdditions,
) -> Tensor:
    """Returns `routed_experts`, adapter by adapter."""
    index_T = torch.from_numpy(additions.index_T).to(x_TD.device)
    sum_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
    for index in index_T.unique().tolist():
        rows_R = (index_T == index).nonzero()[:, 0]
        own = experts if index < 0 else additions.additions[index].of(experts)
        sum_TD[rows_R] = routed_experts(
            x_TD[rows_R], expert_ids_TK[rows_R], weights_TK[rows_R], own
        )
    return sum_TD


class TorchAdapterKernels:
    """Implements AdapterKernels."""

    adds_to_experts = True

    def expert_additions(
        self,
        additions: Mapping[int, ExpertAddition],
        is_changed_E: Tensor,
        rest: Rest = no_rest,
    ) -> TorchExpertAdditions:
        return TorchExpertAdditions(additions, is_changed_E)

    def adapter(self, layers: Sequence[AdapterParts], model: ModelTune | None = None) -> None:
        return None

    def rows(self, index_T: NDArray[np.int64], adapters: Sequence[object]) -> AdaptedRows:
        raise AssertionError("torch prepares no adapter")
