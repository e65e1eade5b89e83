"""The router of one layer: takes normed rows and returns rows with experts and weights.

T rows, D model width, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.interface.kernels import Kernels, RouterLinear
from moe_serve.model.spec import RouterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The router weights of one layer: logits, and biases of the choice."""

    linear: RouterLinear
    selection_bias_E: Tensor | None = None  # fp32


def choose_experts(kernels: Kernels, spec: RouterSpec, router: Router, x_TD: Tensor) -> RoutedRows:
    """Return the rows for the experts. Models that weigh the experts' inputs multiply them here."""
    ids_TK, weights_TK = kernels.route(router.linear(x_TD), spec.shape, router.selection_bias_E)
    if not spec.is_weighing_inputs:
        return RoutedRows(x_TD, ids_TK, weights_TK)
    weighed_TD = x_TD * weights_TK.to(x_TD.dtype)
    return RoutedRows(weighed_TD, ids_TK, weights_TK.new_ones(weights_TK.shape))
