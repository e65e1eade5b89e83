"""The likeliest tokens of rows, in an order that neither the batch nor the algorithm decides.

R rows, V tokens, N wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_AT_ONCE = 32  # of a usual vocabulary: 40 MB of keys
_LOW_BITS = 2**32 - 1


def likeliest(logits_RV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """-> ids [R, N] and logits [R, N], descending; equal logits by ascending id.

    `torch.topk` promises no order among equals, so it gets none: keys hold the logit and the id.
    """
    assert logits_RV.dtype == torch.float32, f"logits are {logits_RV.dtype}, not fp32"
    ids_RN = torch.empty(len(logits_RV), num, dtype=torch.int64, device=logits_RV.device)
    if num:
        rows = range(0, len(logits_RV), _ROWS_AT_ONCE)
        for start in rows:
            part = slice(start, start + _ROWS_AT_ONCE)
            keys = _keys(logits_RV[part]).topk(num, dim=-1).values
            ids_RN[part] = _LOW_BITS - (keys & _LOW_BITS)
    return ids_RN, logits_RV.gather(1, ids_RN)


def _keys(logits_RV: Tensor) -> Tensor:
    """int64 that ascend with the logit, and for equal logits descend with the id.

    A float's bits ascend with it while it is positive and descend while it is negative.
    """
    bits = (logits_RV + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    return (ordered << 32) | (_LOW_BITS - ids_V)
