"""The router: which experts a row goes to, and with which weights.

T rows, D model width, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_kernels.linear import FastLinear
from moe_serve.model.spec import RouterSpec


def route(x_TD: Tensor, weight: FastLinear, spec: RouterSpec) -> RoutedRows:
    """Softmax over all experts in fp32, top-k, then the chosen in ascending order of expert id.

    The ascending order fixes the order of every later sum.
    """
    scores_TE = torch.softmax(weight(x_TD).float(), dim=-1)
    weights_TK, ids_TK = torch.topk(scores_TE, spec.top_k, dim=-1)
    if spec.is_renormalised:
        weights_TK = weights_TK / _row_sum(weights_TK)
    ids_TK, order_TK = torch.sort(ids_TK, dim=-1)
    return RoutedRows(x_TD, ids_TK, weights_TK.gather(1, order_TK))


def _row_sum(x_TK: Tensor) -> Tensor:
    """Left to right, so that it is the same for any number of rows. [T, 1]."""
    total = x_TK[:, 0:1].clone()
    for k in range(1, x_TK.shape[1]):
        total += x_TK[:, k : k + 1]
    return total
