"""Biases and penalties, log probabilities, and the draws. S rows, V tokens, M entries."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.gpu.sampling.heuristics import SamplingConfig, sampling_config
from moe_kernels.gpu.sampling.logits_kernel import (
    adjust_logits,
    block_logprobs,
    draw_uniform,
    join_logprobs,
)
from moe_kernels.gpu.sampling.rows import Adjustments, TokenScores

_ENTRIES_PER_PROGRAM = 256


def adjust(logits_SV: Tensor, adjustments: Adjustments) -> None:
    """Biases, then the repetition penalty, then presence and frequency: in place, in fp32.

    The logit of a banned token becomes -inf.
    """
    assert logits_SV.dtype == torch.float32, f"logits are {logits_SV.dtype}, not fp32"
    assert logits_SV.is_contiguous(), f"logits have strides {logits_SV.stride()}"
    num_entries = len(adjustments.rows_M)
    if not num_entries:
        return
    adjust_logits[(-(-num_entries // _ENTRIES_PER_PROGRAM),)](
        logits_SV,
        adjustments.rows_M,
        adjustments.tokens_M,
        adjustments.biases_M,
        adjustments.counts_M,
        adjustments.is_seen_M.view(torch.uint8),
        adjustments.repetitions_S,
        adjustments.presences_S,
        adjustments.frequencies_S,
        num_entries,
        VOCAB=logits_SV.shape[1],
        BLOCK=_ENTRIES_PER_PROGRAM,
        num_warps=4,
        enable_fp_fusion=False,  # as torch: products are rounded before they are added
    )


def score_tokens(
    logits_SV: Tensor, tokens_S: Tensor, config: SamplingConfig | None = None
) -> TokenScores:
    """The log probability of one token of each row, and its rank: 1 + the larger logits."""
    num_rows, vocab_size = logits_SV.shape
    assert logits_SV.dtype == torch.float32, f"logits are {logits_SV.dtype}, not fp32"
    assert logits_SV.is_contiguous(), f"logits have strides {logits_SV.stride()}"
    assert tokens_S.shape == (num_rows,), f"{tokens_S.shape} tokens of {num_rows} rows"
    config = config or sampling_config(vocab_size)
    size = (num_rows, config.num_blocks)
    tops_SN, sums_SN = logits_SV.new_empty(size), logits_SV.new_empty(size)
    counts_SN = logits_SV.new_empty(size, dtype=torch.int32)
    scores = TokenScores(
        logits_SV.new_empty(num_rows),
        logits_SV.new_empty(num_rows, dtype=torch.int32),
        logits_SV.new_empty(num_rows),
        logits_SV.new_empty(num_rows),
    )
    if not num_rows:
        return scores
    parts = (logits_SV, tokens_S, tops_SN, sums_SN, counts_SN)
    block_logprobs[size](*parts, VOCAB=vocab_size, BLOCK=config.block, num_warps=config.num_warps)
    join_logprobs[(num_rows,)](
        *parts,
        scores.logprobs_S,
        scores.ranks_S,
        scores.tops_S,
        scores.log_totals_S,
        VOCAB=vocab_size,
        NUM_BLOCKS=config.num_blocks,
        BLOCK_N=config.block_blocks,
        num_warps=1,
    )
    return scores


def uniform(seeds_S: Tensor, choices_S: Tensor, positions_S: Tensor) -> Tensor:
    """One number in [0, 1) per row, fp64, by (seed, choice, position) alone: Philox 4x64-10.

    All int64; a seed of 2^63 or more is given as the negative number of the same bits.
    """
    for name, keys in (("seeds", seeds_S), ("choices", choices_S), ("positions", positions_S)):
        assert keys.dtype == torch.int64, f"{name} are {keys.dtype}, not int64"
        assert keys.shape == seeds_S.shape, f"{name} are {keys.shape}, not {seeds_S.shape}"
    draws_S = torch.empty(len(seeds_S), dtype=torch.float64, device=seeds_S.device)
    if len(seeds_S):
        draw_uniform[(-(-len(seeds_S) // 32),)](
            seeds_S, choices_S, positions_S, draws_S, len(seeds_S), BLOCK=32, num_warps=1
        )
    return draws_S
