"""Rounds a matrix column by column, and lets later columns make up for the errors of earlier ones.

N rows, K columns. With the inputs' second moments H [K, K] the error of a matrix W' is the trace of
(W - W') H (W - W')^T. Source: Frantar et al., GPTQ (2023), algorithm 1, with the scales of all
groups chosen beforehand (static groups), so that columns can be rounded in any order and the stored
groups are still neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.quantize.rounded_matrix import RoundedMatrix, Storage
from moe_serve.quantize.rtn import chosen_scales

_BLOCK = 128
_DAMPING = 0.01  # of the mean of H's diagonal


def gptq_rounded(
    weight_NK: Tensor, hessian_KK: Tensor, storage: Storage, scale_dtype: torch.dtype
) -> RoundedMatrix:
    """Rounds a matrix for inputs whose second moments are `hessian_KK`, the most used columns
    first.

    Columns without any input are rounded like others: the damping gives them a small weight.
    """
    hessian_KK = _damped(hessian_KK)
    scales_NG = chosen_scales(weight_NK, storage, scale_dtype, hessian_KK.diagonal())
    order_K = hessian_KK.diagonal().argsort(descending=True)
    columns = weight_NK.shape[1] // scales_NG.shape[1]
    upper_KK = _inverse_factor(hessian_KK[order_K][:, order_K])
    scales_KN = scales_NG.float().t()[order_K // columns]
    values_KN = _rounded_columns(weight_NK.float().t()[order_K], scales_KN, upper_KK, storage)
    values_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    values_NK[:, order_K] = values_KN.t()
    return RoundedMatrix(storage, values_NK, scales_NG)


def _damped(hessian_KK: Tensor) -> Tensor:
    mean = float(hessian_KK.diagonal().mean())
    damping = _DAMPING * mean if mean > 0 else 1.0
    return hessian_KK + damping * torch.eye(len(hessian_KK))


def _inverse_factor(hessian_KK: Tensor) -> Tensor:
    """Returns the upper triangle U with U^T U = H^-1."""
    lower = torch.linalg.cholesky(hessian_KK.double())
    inverse = torch.cholesky_inverse(lower)
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return upper


def _rounded_columns(
    weight_KN: Tensor, scales_KN: Tensor, upper_KK: Tensor, storage: Storage
) -> Tensor:
    """Returns the values [K, N]; a column of the matrix is a row here, so that it is contiguous."""
    weight_KN = weight_KN.contiguous()
    values_KN = torch.empty(weight_KN.shape, dtype=torch.int8)
    for start in range(0, len(weight_KN), _BLOCK):
        stop = min(start + _BLOCK, len(weight_KN))
        block_bN = weight_KN[start:stop]
        upper_bb = upper_KK[start:stop, start:stop]
        errors_bN = torch.empty_like(block_bN)
        for i, scale_N in enumerate(scales_KN[start:stop]):
            value_N = (block_bN[i] / scale_N).round_().clamp_(-storage.most - 1, storage.most)
            values_KN[start + i] = value_N.to(torch.int8)
            error_N = (block_bN[i] - value_N * scale_N) / upper_bb[i, i]
            errors_bN[i] = error_N
            block_bN[i + 1 :].addr_(upper_bb[i, i + 1 :], error_N, alpha=-1.0)
        weight_KN[stop:].addmm_(upper_KK[start:stop, stop:].t(), errors_bN, alpha=-1.0)
    return values_KN
