"""Converts the sampling parameters of a step's points into the arrays that kernels take.

S rows, M entries: single tokens of single rows, where a logit is biased, penalised or banned.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from moe_kernels.interface.token_sampler import SamplingStep, TokenEntries, TokenMasks
from moe_serve.engine.sampling.sampling_point import SamplingPoint


def make_sampling_step(
    points: Rows[SamplingPoint], eos_token_ids: Collection[int], masks: TokenMasks | None = None
) -> SamplingStep:
    """Builds the arrays with the same numbers that the torch sampler uses, row by row."""
    params = [p.params for p in points]
    scored = [row for row, p in enumerate(params) if p.logprobs is not None]
    return SamplingStep(
        temperatures_S=np.array([0.0 if p.is_greedy else p.temperature for p in params], "f4"),
        min_ps_S=np.array([p.min_p for p in params], "f4"),
        top_ks_S=np.array([max(p.top_k, 0) for p in params], "i4"),
        top_ps_S=np.array([p.top_p for p in params], "f8"),
        seeds_S=np.array([p.sequence.seed for p in points], "i8"),
        choices_S=np.array([p.sequence.request.choice for p in points], "i8"),
        positions_S=np.array([p.position for p in points], "i8"),
        repetitions_S=np.array([p.repetition_penalty for p in params], "f4"),
        presences_S=np.array([p.presence_penalty for p in params], "f4"),
        frequencies_S=np.array([p.frequency_penalty for p in params], "f4"),
        entries=_entries(points, eos_token_ids),
        scored_rows_R=np.array(scored, "i8"),
        num_top=max((p.logprobs or 0 for p in params), default=0),
        masks=masks,
    )


def _entries(points: Rows[SamplingPoint], eos_token_ids: Collection[int]) -> TokenEntries | None:
    parts = []
    for row, point in enumerate(points):
        params, bans_end = point.params, point.bans_end
        if params.logit_bias or params.has_penalties or bans_end:
            banned = (*eos_token_ids, *params.stop_token_ids) if bans_end else ()
            parts.append(_entries_of(row, point, banned))
    parts = [part for part in parts if len(part.tokens_M)]
    if not parts:
        return None
    return TokenEntries(
        rows_M=np.concatenate([part.rows_M for part in parts]),
        tokens_M=np.concatenate([part.tokens_M for part in parts]),
        biases_M=np.concatenate([part.biases_M for part in parts]),
        counts_M=np.concatenate([part.counts_M for part in parts]),
        is_seen_M=np.concatenate([part.is_seen_M for part in parts]),
    )


def _entries_of(row: int, point: SamplingPoint, banned: Collection[int]) -> TokenEntries:
    """Returns one row's tokens, each once. A token may be biased, seen, in the answer and banned
    together.

    Example, the prompt [5, 3], the answer [3, 7], penalties of repetition and presence, a bias of 2
    for 9: tokens [3, 5, 7, 9], biases [0, 0, 0, 2], counts [1, 0, 1, 0], seen [1, 1, 1, 0].
    """
    params = point.params
    is_counting = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    counts = point.output_counts if is_counting else {}
    kinds = [_ids(point.seen), _ids(counts), _ids(params.logit_bias), _ids(banned)]
    tokens = np.concatenate(kinds)
    if banned or len(tokens) > max(map(len, kinds)):
        tokens, places = np.unique(tokens, return_inverse=True)
    else:  # only one kind, the usual case: no token is repeated
        places = np.arange(len(tokens))
    num_seen, num_counted, num_biased, _ = map(len, kinds)
    num_known = num_seen + num_counted
    biases, found = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
    is_seen = np.zeros(len(tokens), np.bool_)
    is_seen[places[:num_seen]] = True
    found[places[num_seen:num_known]] = np.fromiter(counts.values(), np.int32, num_counted)
    if num_biased:
        biases[places[num_known : num_known + num_biased]] = list(params.logit_bias.values())
    biases[places[num_known + num_biased :]] = -np.inf
    return TokenEntries(
        rows_M=np.full(len(tokens), row, np.int64),
        tokens_M=tokens,
        biases_M=biases,
        counts_M=found,
        is_seen_M=is_seen,
    )


def _ids(tokens: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, np.int64, len(tokens))
