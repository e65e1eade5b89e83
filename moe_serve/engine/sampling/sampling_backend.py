"""Chooses the sampler that turns logits into tokens: the torch sampler, or that of a set of
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import numpy as np
from torch import Tensor

from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.token_sampler import ScoredTokens, TokenMasks, TokenSampler
from moe_serve.engine.request.request import TokenLogprob
from moe_serve.engine.sampling.sampler import Sampled, Sampler, with_given
from moe_serve.engine.sampling.sampling_point import SamplingPoint
from moe_serve.engine.sampling.sampling_step import make_sampling_step


class SamplingBackend(Protocol):
    """Samples tokens. Each row's result depends on its own logits, request and history only; logits
    are not changed."""

    def sample(
        self, logits_SV: Tensor, points: Rows[SamplingPoint], masks: TokenMasks | None = None
    ) -> list[Sampled]:
        """Samples one token for each row, at its point. A faulty row does not affect others.
        `masks` restrict some rows and allow at least one token each."""
        ...

    def describe(self, logits_RV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
        """Returns the log probability and rank of one token per row, and the row's likeliest
        tokens."""
        ...


class KernelSampler:
    """Implements SamplingBackend by kernels, with the same order of operations as `Sampler`."""

    def __init__(self, eos_token_ids: frozenset[int], kernels: TokenSampler) -> None:
        self._eos, self._kernels = sorted(eos_token_ids), kernels

    def sample(
        self, logits_SV: Tensor, points: Rows[SamplingPoint], masks: TokenMasks | None = None
    ) -> list[Sampled]:
        """Samples one token for each row, at its point."""
        step = make_sampling_step(points, self._eos, masks)
        done = self._kernels.sample(logits_SV, step)
        tokens: list[int] = done.tokens_S.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(points)
        if done.scores is not None:
            rows: list[int] = step.scored_rows_R.tolist()
            wanted = [points[row].params.logprobs or 0 for row in rows]
            entries = _described(done.scores, [tokens[row] for row in rows], wanted)
            for row, entry in zip(rows, entries, strict=True):
                given = points[row].params.logprob_token_ids
                logprobs[row] = with_given(entry, logits_SV[row], given)
        fields = zip(tokens, done.is_valid_S.tolist(), logprobs, strict=True)
        return [Sampled(*row) for row in fields]

    def describe(self, logits_RV: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprob]:
        """Returns the log probability and rank of one token per row, and the row's likeliest
        tokens."""
        if not tokens:
            return []
        scores = self._kernels.score(logits_RV, np.array(tokens, dtype=np.int64), num_top)
        return _described(scores, tokens, [num_top] * len(tokens))


def _described(scores: ScoredTokens, tokens: list[int], wanted: list[int]) -> list[TokenLogprob]:
    rows = zip(
        tokens,
        wanted,
        scores.logprobs_R.tolist(),
        scores.ranks_R.tolist(),
        scores.top_ids_RN.tolist(),
        scores.top_logprobs_RN.tolist(),
        strict=True,
    )
    return [
        TokenLogprob(token, value, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token, num, value, rank, ids, values in rows
    ]


def make_sampler(eos_token_ids: frozenset[int], kernels: Kernels) -> SamplingBackend:
    """Builds the kernels' sampler, or the torch sampler if the kernels have none."""
    on_device = kernels.token_sampler()
    if on_device is None:
        return Sampler(eos_token_ids, kernels.largest)
    return KernelSampler(eos_token_ids, on_device)
