"""Defines the result of the sampling kernels in plain torch; it sorts every row.

S rows, V tokens. The server's own sampler has the same definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.gpu.sampling.sampling_rows import Adjustments, SamplingRows


def adjust(logits_SV: Tensor, adjustments: Adjustments) -> Tensor:
    """Returns a copy with each entry's bias added, then the repetition penalty, then the other
    two."""
    adjusted = logits_SV.clone()
    for i, (row, token) in enumerate(
        zip(adjustments.rows_M.tolist(), adjustments.tokens_M.tolist(), strict=True)
    ):
        x = adjusted[row, token] + adjustments.biases_M[i]
        repetition = adjustments.repetitions_S[row]
        if adjustments.is_seen_M[i] and repetition != 1.0:
            x = x / repetition if x > 0 else x * repetition
        count = adjustments.counts_M[i]
        if count > 0:
            x = x - (adjustments.frequencies_S[row] * count + adjustments.presences_S[row])
        is_banned = adjustments.biases_M[i] == float("-inf")
        adjusted[row, token] = float("-inf") if is_banned else x
    return adjusted


def probabilities(logits_SV: Tensor, temperatures_S: Tensor) -> Tensor:
    """Softmax of the logits over the temperature (1 where it is 0), [S, V] in fp32."""
    shifted_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
    temperatures_S = torch.where(temperatures_S > 0, temperatures_S, 1.0)
    return torch.softmax(shifted_SV / temperatures_S[:, None], dim=-1)


def least_probabilities(probs_SV: Tensor, rows: SamplingRows) -> Tensor:
    """-> [S]: min_p, then top-k, then top-p of the rest; the likeliest token always stays.

    A cut by value: tokens that tie with the last one kept are kept too.
    """
    num = probs_SV.shape[-1]
    top_k_S1 = torch.where(rows.top_ks_S > 0, rows.top_ks_S, num)[:, None]
    sorted_SV = probs_SV.sort(dim=-1, descending=True).values
    keep_SV = sorted_SV >= rows.min_ps_S[:, None] * sorted_SV[:, :1]
    keep_SV &= torch.arange(num, device=probs_SV.device)[None] < top_k_S1
    kept_SV = (sorted_SV * keep_SV).double()
    cumulative_SV = kept_SV.cumsum(dim=-1)
    before_SV, total_S1 = cumulative_SV - kept_SV, cumulative_SV[:, -1:]
    keep_SV &= (before_SV < rows.top_ps_S[:, None] * total_S1) | (rows.top_ps_S[:, None] >= 1.0)
    last_S1 = keep_SV.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return sorted_SV.gather(1, last_S1)[:, 0]


def draw(probs_SV: Tensor, draws_S: Tensor, least_S: Tensor | None = None) -> Tensor:
    """Returns the first token whose cumulative probability exceeds the draw times the total, int64
    [S]."""
    if least_S is not None:
        probs_SV = probs_SV * (probs_SV >= least_S[:, None])
    cumulative_SV = probs_SV.double().cumsum(dim=-1)
    total_S1 = cumulative_SV[:, -1:].contiguous()
    index_S1 = torch.searchsorted(cumulative_SV, draws_S[:, None] * total_S1, right=True)
    return torch.minimum(index_S1, torch.searchsorted(cumulative_SV, total_S1))[:, 0]
