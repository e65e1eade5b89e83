"""Rounds a matrix to the nearest values, with scales that make the squared error small.

N rows, K columns, G groups of C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.quantize.rounded_matrix import E2M1_DOUBLED, RoundedMatrix, Storage

_SHRINKS = tuple(1.0 - step / 40 for step in range(15))  # 1.0 down to 0.65
_VALUES_AT_ONCE = 2**21


def rounded(
    weight_NK: Tensor,
    storage: Storage,
    scale_dtype: torch.dtype,
    importance_K: Tensor | None = None,
) -> RoundedMatrix:
    """Rounds each value to the nearest multiple of its group's scale.

    `importance_K`: weights of the columns' squared errors, for the choice of scales.
    """
    scales_NG = chosen_scales(weight_NK, storage, scale_dtype, importance_K)
    values = torch.empty(weight_NK.shape, dtype=torch.int8)
    for rows in _pieces(weight_NK):
        weight_nGC = _grouped(weight_NK[rows], storage)
        scales_nG1 = scales_NG[rows].float()[:, :, None]
        values[rows] = _nearest(weight_nGC, scales_nG1, storage).to(torch.int8).flatten(1)
    return RoundedMatrix(storage, values, scales_NG)


def chosen_scales(
    weight_NK: Tensor,
    storage: Storage,
    scale_dtype: torch.dtype,
    importance_K: Tensor | None = None,
) -> Tensor:
    """Chooses each group's scale [N, G]. Tries several fractions of the scale that just fits the
    largest value, and takes the one with the smallest squared error. int8 takes the whole scale.
    """
    num_groups = storage.num_groups(weight_NK.shape[1])
    scale_dtype = torch.float32 if storage.is_float else scale_dtype
    scales_NG = torch.empty(len(weight_NK), num_groups, dtype=scale_dtype)
    importance_1GC = None
    if importance_K is not None:
        importance_1GC = importance_K.float().view(1, num_groups, -1)
    for rows in _pieces(weight_NK):
        weight_nGC = _grouped(weight_NK[rows], storage)
        scales_NG[rows] = _best(weight_nGC, storage, scale_dtype, importance_1GC)
    return scales_NG


def _best(
    weight_nGC: Tensor, storage: Storage, dtype: torch.dtype, importance_1GC: Tensor | None
) -> Tensor:
    if storage.is_float:
        return _best_powers(weight_nGC, storage)
    widest_nG = weight_nGC.abs().amax(-1) / (storage.most + 0.5)
    if storage.bits == 8:
        widest_nG = widest_nG * ((storage.most + 0.5) / storage.most)
    widest_nG = torch.where(widest_nG > 0, widest_nG, 1.0)
    best_nG = _in_dtype(widest_nG, dtype)
    if storage.bits == 8:
        return best_nG
    least_nG = torch.full_like(widest_nG, torch.inf)
    for shrink in _SHRINKS:
        scales_nG = _in_dtype(widest_nG * shrink, dtype)
        scales_nG1 = scales_nG.float()[:, :, None]
        error_nGC = (_nearest(weight_nGC, scales_nG1, storage) * scales_nG1 - weight_nGC).square_()
        if importance_1GC is not None:
            error_nGC *= importance_1GC
        error_nG = error_nGC.sum(-1)
        is_better = error_nG < least_nG
        best_nG = torch.where(is_better, scales_nG, best_nG)
        least_nG = torch.where(is_better, error_nG, least_nG)
    return best_nG


def _best_powers(weight_nGC: Tensor, storage: Storage) -> Tensor:
    """Returns the better of two powers of two, by squared error: the one with which the largest
    value falls between 8 and 16 (above 12 it is cut), and twice that.
    """
    largest_nG = weight_nGC.abs().amax(-1).clamp_min(2.0**-120)
    low_nG = torch.exp2(largest_nG.log2().floor() - 3)
    errors = []
    for scales_nG in (low_nG, 2 * low_nG):
        scales_nG1 = scales_nG[:, :, None]
        error_nGC = _nearest(weight_nGC, scales_nG1, storage) * scales_nG1 - weight_nGC
        errors.append(error_nGC.square_().sum(-1))
    return torch.where(errors[0] <= errors[1], low_nG, 2 * low_nG)


def _in_dtype(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds scales to the dtype. A scale that would vanish becomes the smallest normal number."""
    return scales.clamp_min(torch.finfo(dtype).tiny).to(dtype)


def _nearest(weight_nGC: Tensor, scales_nG1: Tensor, storage: Storage) -> Tensor:
    if storage.is_float:
        doubled = torch.tensor(E2M1_DOUBLED, dtype=torch.float32)
        sizes_nGC = (weight_nGC / scales_nG1).abs().contiguous()
        places = torch.bucketize(sizes_nGC, (doubled[1:] + doubled[:-1]) / 2)
        return doubled[places].copysign_(weight_nGC)
    return (weight_nGC / scales_nG1).round_().clamp_(-storage.most - 1, storage.most)


def _grouped(weight_nK: Tensor, storage: Storage) -> Tensor:
    num_groups = storage.num_groups(weight_nK.shape[1])
    weight_nGC: Tensor = weight_nK.float().unflatten(1, (num_groups, -1))
    return weight_nGC


def _pieces(weight_NK: Tensor) -> list[slice]:
    """Returns slices of rows whose values in float32 stay small."""
    step = max(1, _VALUES_AT_ONCE // max(1, weight_NK.shape[1]))
    return [slice(start, start + step) for start in range(0, len(weight_NK), step)]
