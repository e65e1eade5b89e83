"""The parts of a layer's feed-forward side that attention ranks compute: router and dense MLP.

T rows, D model width, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_kernels.interface.adapters import AddingBank, RowAdditions
from moe_kernels.interface.kernels import ExpertBank, Kernels, RouterLinear
from moe_serve.model.spec import RouterSpec
from moe_serve.model.stage.adapter_rows import LayerAdditions
from moe_serve.model.stage.gather import GatheredMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router weights of one layer: logits, and biases of the choice."""

    linear: RouterLinear
    selection_bias_E: Tensor | None = None  # fp32


def choose_experts(
    kernels: Kernels,
    spec: RouterSpec,
    router: Router,
    x_TD: Tensor,
    additions: LayerAdditions | None = None,
) -> RoutedRows:
    """Returns the rows for the experts. Models that weigh the experts' inputs multiply them
    here. `additions`: of the adapters, some of which may have their own router."""
    ids_TK, weights_TK = kernels.route(router.linear(x_TD), spec.shape, router.selection_bias_E)
    if additions is not None:
        additions.routed(spec.shape, x_TD, ids_TK, weights_TK)
    if not spec.is_weighing_inputs:
        return RoutedRows(x_TD, ids_TK, weights_TK)
    weighed_TD = x_TD * weights_TK.to(x_TD.dtype)
    return RoutedRows(weighed_TD, ids_TK, weights_TK.new_ones(weights_TK.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    """An MLP that every row passes: a shared expert, or the MLP of a layer without routed experts.

    It is a bank of one expert, so it uses the routed experts' kernels and formats. Computes
    x [T, D] -> [T, D] in fp32, multiplied by sigmoid(gate(x)) if there is a gate.
    """

    bank: ExpertBank | GatheredMLP
    gate: RouterLinear | None = None

    def __call__(self, x_TD: Tensor, added: RowAdditions | None = None) -> Tensor:
        """`added`: the additions of adapters to some rows."""
        ids_T1 = torch.zeros(len(x_TD), 1, dtype=torch.int64, device=x_TD.device)
        if self.gate is None:
            weights_T1 = torch.ones(len(x_TD), 1, dtype=torch.float32, device=x_TD.device)
        else:
            weights_T1 = 1.0 / (1.0 + torch.exp(-self.gate(x_TD)))
        if added is None:
            return self.bank(x_TD, ids_T1, weights_T1)
        assert isinstance(self.bank, AddingBank), f"{type(self.bank).__name__} has no additions"
        return self.bank.added_partial(x_TD, ids_T1, weights_T1, added).float()

    def adapted(self, x_TD: Tensor, additions: LayerAdditions | None) -> Tensor:
        """Computes the MLP with the additions of adapters. Rows of an adapter that replaces the MLP
        use the adapter's."""
        if additions is None:
            return self(x_TD)
        out_TD = self(x_TD, additions.to_mlp)
        for group, layer in additions.mlps:
            assert layer.mlp is not None, "a layer with an MLP"
            own = replace(self, bank=layer.mlp, gate=layer.gate or self.gate)
            out_TD = group.put(out_TD, own(group.select(x_TD)))
        return out_TD
