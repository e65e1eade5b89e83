"""The router's choice in plain torch. T rows, E experts, K top-k, G groups of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """The rule that turns logits into a choice of experts and their weights.

    scores = softmax or sigmoid of the logits; the k best of scores + selection bias are chosen,
    among the `num_groups_kept` best groups; weights = their scores (without the bias), divided by
    their sum (at least `renorm_floor`) if `is_renormalised`, times `scaling`.

    A group's score is its best expert (DeepSeek-V2) or the sum of its two best (DeepSeek-V3).
    A softmax over the chosen logits alone is the renormalised softmax over all.
    """

    num_experts: int
    top_k: int
    is_renormalised: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renorm_floor: float = 0.0
    num_groups: int = 1
    num_groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling: float = 1.0


def route(
    logits_TE: Tensor, shape: RouterShape, selection_bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> ids (int64) and weights (fp32), both [T, K], the chosen in ascending order of expert id.

    The ascending order fixes the order of every later sum.
    """
    logits_TE = logits_TE.float()
    is_sigmoid = shape.scoring == "sigmoid"
    scores_TE = _sigmoid(logits_TE) if is_sigmoid else torch.softmax(logits_TE, dim=-1)
    choice_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    if shape.num_groups > 1:
        choice_TE = _keep_best_groups(choice_TE, shape)
    ids_TK = torch.topk(choice_TE, shape.top_k, dim=-1).indices.sort(dim=-1).values
    weights_TK = scores_TE.gather(1, ids_TK)
    if shape.is_renormalised:
        weights_TK = weights_TK / _row_sum(weights_TK).clamp_min(shape.renorm_floor)
    return ids_TK, weights_TK * shape.scaling


def _sigmoid(x: Tensor) -> Tensor:
    """From operations whose result does not depend on a value's position: torch.sigmoid's does."""
    return 1.0 / (1.0 + torch.exp(-x))


def _keep_best_groups(choice_TE: Tensor, shape: RouterShape) -> Tensor:
    """-inf for the experts of groups that are not among the best."""
    groups = choice_TE.view(len(choice_TE), shape.num_groups, -1)
    best = groups.topk(2 if shape.group_score == "top2" else 1, dim=-1).values
    kept = best.sum(-1).topk(shape.num_groups_kept, dim=-1).indices
    is_kept = torch.zeros_like(best[..., 0], dtype=torch.bool).scatter_(1, kept, True)
    return groups.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(1)


def _row_sum(x_TK: Tensor) -> Tensor:
    """Left to right, so that it is the same for any number of rows. [T, 1]."""
    total = x_TK[:, 0:1].clone()
    for k in range(1, x_TK.shape[1]):
        total += x_TK[:, k : k + 1]
    return total
