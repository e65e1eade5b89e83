"""The router's choice in plain torch. T rows, E experts, K top-k."""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits_TE: Tensor, top_k: int, is_renormalised: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in fp32, top-k, then the chosen in ascending order of expert id.

    The ascending order fixes the order of every later sum.
    """
    scores_TE = torch.softmax(logits_TE.float(), dim=-1)
    weights_TK, ids_TK = torch.topk(scores_TE, top_k, dim=-1)
    if is_renormalised:
        weights_TK = weights_TK / _row_sum(weights_TK)
    ids_TK, order_TK = torch.sort(ids_TK, dim=-1)
    return ids_TK, weights_TK.gather(1, order_TK)


def _row_sum(x_TK: Tensor) -> Tensor:
    """Left to right, so that it is the same for any number of rows. [T, 1]."""
    total = x_TK[:, 0:1].clone()
    for k in range(1, x_TK.shape[1]):
        total += x_TK[:, k : k + 1]
    return total
