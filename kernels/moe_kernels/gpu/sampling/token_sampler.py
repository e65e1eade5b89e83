"""A step's sampling on the device: one copy there, kernels, one copy back.

S rows, V tokens, M entries, C masked rows, R scored rows, N likeliest tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.gpu.sampling.api import sample
from moe_kernels.gpu.sampling.logits_api import adjust, score_tokens, uniform
from moe_kernels.gpu.sampling.rows import Adjustments, SamplingRows
from moe_kernels.gpu.sampling.tops import likeliest
from moe_kernels.gpu.transfers import download, upload
from moe_kernels.interface.token_sampler import (
    SampledStep,
    SamplingStep,
    ScoredTokens,
    ban_others_on_device,
)


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
    """Draw parameters of the rows, adjustments of logits (or None), and the rows to score."""
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
