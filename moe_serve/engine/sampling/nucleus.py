"""Where min_p, top-k and top-p cut: the smallest probability that each row keeps.

A cut by value, not by rank, needs sorted values only. Equal values have no order, so the cut does
not depend on a sorting algorithm or on how much of a row was sorted: tokens that tie with the last
one kept are kept too. S rows, V vocabulary, N the part of a row that is sorted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_serve.engine.request.sampling_params import SamplingParams

_USUAL_NUCLEUS = 1024  # tokens; a row whose nucleus is larger is sorted as a whole


def least_probabilities(probs_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-> [S, 1]. min_p, then top-k, then top-p of what is left; the likeliest always stays."""
    vocab_size = probs_SV.shape[-1]
    most = max((p.top_k for p in params), default=0)
    least_S1, is_certain_S = _cut(probs_SV, params, min(vocab_size, max(_USUAL_NUCLEUS, most)))
    unsure = (~is_certain_S).nonzero()[:, 0].tolist()
    if unsure:
        exact, _ = _cut(probs_SV[unsure], [params[i] for i in unsure], vocab_size)
        least_S1[unsure] = exact
    return least_S1


def _cut(probs_SV: Tensor, params: Sequence[SamplingParams], num: int) -> tuple[Tensor, Tensor]:
    """The cuts by the `num` largest values, and whether those were enough [S]."""
    device = probs_SV.device
    min_p_S1 = torch.tensor([[p.min_p] for p in params], device=device)
    top_k_S1 = torch.tensor([[p.top_k if p.top_k > 0 else 2**31] for p in params], device=device)
    top_p_S1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
    sorted_SN = probs_SV.topk(num, dim=-1).values
    floor_S1 = min_p_S1 * sorted_SN[:, :1]
    keep_SN = (sorted_SN >= floor_S1) & (torch.arange(num, device=device)[None] < top_k_S1)
    kept_SN = (sorted_SN * keep_SN).double()
    cumulative_SN = kept_SN.cumsum(dim=-1)  # one addition after the other: no matter how many
    all_SV = (probs_SV * (probs_SV >= floor_S1)).double().cumsum(dim=-1)
    has_top_k_S1 = top_k_S1 <= num
    total_S1 = torch.where(has_top_k_S1, cumulative_SN[:, -1:], all_SV[:, -1:])
    keep_SN &= cumulative_SN - kept_SN < top_p_S1 * total_S1
    last_S1 = keep_SN.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    is_whole_S1 = has_top_k_S1 | (sorted_SN[:, -1:] < floor_S1) | (num == probs_SV.shape[-1])
    is_certain_S1 = is_whole_S1 | (cumulative_SN[:, -1:] >= top_p_S1 * total_S1)
    return sorted_SN.gather(1, last_S1), is_certain_S1[:, 0]
