"""A step's sampling on the device: one copy there, kernels, one copy back.

S rows, V tokens, M entries, C masked rows, R scored rows, N likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.gpu.sampling.api import adjust, sample, score_tokens, uniform
from moe_kernels.gpu.sampling.sampling_rows import Adjustments, SamplingRows
from moe_kernels.interface.token_sampler import (
    SampledStep,
    SamplingStep,
    ScoredTokens,
    ban_others_on_device,
)

_ROWS_AT_ONCE = 32  # of a usual vocabulary: 40 MB of keys
_LOW_BITS = 2**32 - 1
_ALIGNMENT = 16  # bytes: what kernels are compiled for


class GpuTokenSampler:
    """Implements TokenSampler."""

    def sample(self, logits_SV: Tensor, step: SamplingStep) -> SampledStep:
        assert len(logits_SV) == step.num_rows, f"{len(logits_SV)} rows, {step.num_rows} wanted"
        logits_SV = logits_SV.contiguous()
        rows, adjustments, scored_R = _uploaded(step, logits_SV.device)
        adjusted_SV = logits_SV
        if adjustments is not None:
            adjusted_SV = logits_SV.clone()
            adjust(adjusted_SV, adjustments)
        if step.masks is not None:
            adjusted_SV = logits_SV.clone() if adjustments is None else adjusted_SV
            bits_CW = step.masks.bits_CW.view(np.int32)
            ban_others_on_device(
                adjusted_SV, *upload((step.masks.rows_C, bits_CW), logits_SV.device)
            )
        sampled = sample(adjusted_SV, rows)
        if not len(step.scored_rows_R):
            tokens_S, is_valid_S = download((sampled.tokens_S, sampled.is_valid_S))
            return SampledStep(tokens_S, is_valid_S, None)
        tokens_R = sampled.tokens_S
        if len(step.scored_rows_R) < step.num_rows:
            logits_SV = logits_SV.index_select(0, scored_R)
            tokens_R = tokens_R.index_select(0, scored_R)
        ids_RN, *scores = _scores(logits_SV, tokens_R, step.num_top)
        parts = download((sampled.tokens_S, ids_RN, *scores, sampled.is_valid_S))
        tokens_S, ids, logprobs, tops, ranks, is_valid_S = parts
        return SampledStep(tokens_S, is_valid_S, ScoredTokens(logprobs, ranks, ids, tops))

    def score(self, logits_RV: Tensor, tokens_R: NDArray[np.int64], num_top: int) -> ScoredTokens:
        (tokens,) = upload((tokens_R,), logits_RV.device)
        ids, logprobs, tops, ranks = download(_scores(logits_RV.contiguous(), tokens, num_top))
        return ScoredTokens(logprobs, ranks, ids, tops)


def _uploaded(
    step: SamplingStep, device: torch.device
) -> tuple[SamplingRows, Adjustments | None, Tensor]:
    """The parameters of the draws, the adjustments of logits (or None), and the rows to score."""
    keys = (step.seeds_S, step.choices_S, step.positions_S, step.scored_rows_R)
    filters = (step.temperatures_S, step.min_ps_S, step.top_ks_S, step.top_ps_S)
    changes: tuple[NDArray[Any], ...] = ()
    if step.entries is not None:
        entries = step.entries
        changes = (step.repetitions_S, step.presences_S, step.frequencies_S)
        changes += (entries.rows_M, entries.tokens_M, entries.biases_M)
        changes += (entries.counts_M, entries.is_seen_M)
    tensors = upload((*keys, *filters, *changes), device)
    seeds_S, choices_S, positions_S, scored_R = tensors[:4]
    temperatures_S, min_ps_S, top_ks_S, top_ps_S, *changed = tensors[4:]
    if step.is_greedy:
        draws_S = torch.empty_like(top_ps_S)  # not read
    else:
        draws_S = uniform(seeds_S, choices_S, positions_S)
    rows = SamplingRows(
        temperatures_S=temperatures_S,
        draws_S=draws_S,
        min_ps_S=min_ps_S,
        top_ks_S=top_ks_S,
        top_ps_S=top_ps_S,
        has_filter=step.has_filter,
        is_greedy=step.is_greedy,
    )
    return rows, _adjustments(changed) if changed else None, scored_R


def _adjustments(changed: list[Tensor]) -> Adjustments:
    repetitions_S, presences_S, frequencies_S, *entries = changed
    rows_M, tokens_M, biases_M, counts_M, is_seen_M = entries
    return Adjustments(
        rows_M=rows_M,
        tokens_M=tokens_M,
        biases_M=biases_M,
        counts_M=counts_M,
        is_seen_M=is_seen_M,
        repetitions_S=repetitions_S,
        presences_S=presences_S,
        frequencies_S=frequencies_S,
    )


def _scores(
    logits_RV: Tensor, tokens_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> the likeliest ids [R, N], log probabilities [R] of the tokens, [R, N] of the ids, ranks.

    The two are the same arithmetic, so a token that is among the likeliest has one value.
    """
    scores = score_tokens(logits_RV, tokens_R)
    ids_RN, logits_RN = likeliest(logits_RV, min(num_top, logits_RV.shape[1]))
    tops_RN = logits_RN - scores.tops_S[:, None] - scores.log_totals_S[:, None]
    return ids_RN, scores.logprobs_S, tops_RN, scores.ranks_S


def likeliest(logits_RV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns ids [R, N] and logits [R, N], descending; equal logits by ascending id.

    Neither the batch nor the algorithm decides the order.
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


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device as views of one buffer. Does not wait for the device."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # A pinned block is not used again before the copy from it has ended.
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        view[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    buffer = packed.to(device, non_blocking=True)
    return [
        buffer[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def download(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Copies tensors to the host as arrays, in one copy. Waits until the device has computed them.

    The widest dtypes come first, so that all parts of the buffer are aligned.
    """
    widths = [tensor.element_size() for tensor in tensors]
    assert widths == sorted(widths, reverse=True), f"elements of {widths} bytes, not descending"
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    buffer = torch.cat(flat).cpu()
    arrays, start = [], 0
    for tensor, part in zip(tensors, flat, strict=True):
        piece = buffer[start : start + len(part)].view(tensor.dtype)
        arrays.append(piece.view(tensor.shape).numpy())
        start += len(part)
    return arrays
