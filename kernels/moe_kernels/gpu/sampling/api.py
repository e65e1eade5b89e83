"""Turns logits into tokens without sorting a vocabulary. S rows, V tokens, N blocks of a row.

A row's token depends on that row alone. Given bit-equal probabilities it is the token of the plain
definition (`reference.py`): exactly if all tokens kept have 2^-29 or more, otherwise unless the
draw hits the boundary between two tokens to within 2^-52 per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.gpu.sampling import cut_kernel, kernel
from moe_kernels.gpu.sampling.heuristics import SamplingConfig, sampling_config
from moe_kernels.gpu.sampling.logits_kernel import (
    adjust_logits,
    block_logprobs,
    draw_uniform,
    join_logprobs,
)
from moe_kernels.gpu.sampling.sampling_rows import (
    Adjustments,
    SampledRows,
    SamplingRows,
    TokenScores,
)

_NUM_BINS = 256  # as in cut_kernel.py
_ENTRIES_PER_PROGRAM = 256


def sample(
    logits_SV: Tensor, rows: SamplingRows, config: SamplingConfig | None = None
) -> SampledRows:
    """Temperature, min_p, top-k, top-p and the draw. Logits are fp32, already adjusted."""
    num_rows, vocab_size = logits_SV.shape
    _check(logits_SV)
    rows.check(num_rows)
    config = config or sampling_config(vocab_size)
    grid, size = (num_rows, config.num_blocks), (num_rows, config.num_blocks)
    tops_SN, places_SN = logits_SV.new_empty(size), logits_SV.new_empty(size, dtype=torch.int32)
    tokens_S = logits_SV.new_empty(num_rows, dtype=torch.int64)
    is_valid_S = logits_SV.new_empty(num_rows, dtype=torch.uint8)
    sampled = SampledRows(tokens_S, is_valid_S.view(torch.bool))
    if not num_rows:
        return sampled
    options = {"VOCAB": vocab_size, "BLOCK": config.block, "num_warps": config.num_warps}
    blocks = {"NUM_BLOCKS": config.num_blocks, "BLOCK_N": config.block_blocks}
    tops = (tops_SN, places_SN)
    kernel.block_tops[grid](logits_SV, *tops, **options)
    if rows.is_greedy:
        kernel.pick_tops[(num_rows,)](*tops, tokens_S, is_valid_S, **blocks, num_warps=1)
        return sampled
    sums_SN, probs_SV = logits_SV.new_empty(size), torch.empty_like(logits_SV)
    top_probs_S = logits_SV.new_empty(num_rows)
    given = (logits_SV, rows.temperatures_S, *tops, sums_SN)
    kernel.block_weights[grid](*given, **options, **blocks)
    kernel.block_probabilities[grid](*given, probs_SV, top_probs_S, **options, **blocks)
    least_S = least_probabilities(probs_SV, top_probs_S, rows, config) if rows.has_filter else None
    logits = (*tops, rows.temperatures_S, is_valid_S)
    _draw_into(tokens_S, probs_SV, rows.draws_S, least_S, logits, config)
    return sampled


def least_probabilities(
    probs_SV: Tensor, top_probs_S: Tensor, rows: SamplingRows, config: SamplingConfig
) -> Tensor:
    """Returns the smallest probability that each row keeps [S]. `top_probs`: each row's largest."""
    num_rows, vocab_size = probs_SV.shape
    grid, size = (num_rows, config.num_blocks), (num_rows, config.num_blocks)
    # One zeroed buffer: the bins of each row, then how many candidates it has.
    counters = probs_SV.new_zeros(num_rows * (_NUM_BINS + 1), dtype=torch.int32)
    bins, nums_S = counters[: num_rows * _NUM_BINS], counters[num_rows * _NUM_BINS :]
    candidates_SC = probs_SV.new_empty(num_rows, config.capacity)
    masses_SN = probs_SV.new_empty(size, dtype=torch.int64)
    least_S = probs_SV.new_empty(num_rows)
    options = {"VOCAB": vocab_size, "BLOCK": config.block, "num_warps": config.num_warps}
    cut_kernel.count_probabilities[grid](
        probs_SV, top_probs_S, rows.min_ps_S, bins, masses_SN, **options
    )
    cut_kernel.gather_candidates[grid](
        probs_SV, bins, nums_S, candidates_SC, **options, CAPACITY=config.capacity
    )
    cut_kernel.find_cuts[(num_rows,)](
        probs_SV,
        candidates_SC,
        nums_S,
        bins,
        masses_SN,
        top_probs_S,
        rows.min_ps_S,
        rows.top_ks_S,
        rows.top_ps_S,
        least_S,
        VOCAB=vocab_size,
        NUM_BLOCKS=config.num_blocks,
        BLOCK_N=config.block_blocks,
        CAPACITY=config.capacity,
        num_warps=config.search_warps,
    )
    return least_S


def draw(
    probs_SV: Tensor,
    draws_S: Tensor,
    least_S: Tensor | None = None,
    config: SamplingConfig | None = None,
) -> Tensor:
    """Returns the first token whose cumulative probability exceeds the draw times the total, int64
    [S].

    `least`: smaller probabilities count as none.
    """
    num_rows, vocab_size = probs_SV.shape
    _check(probs_SV)
    config = config or sampling_config(vocab_size)
    tokens_S = probs_SV.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _draw_into(tokens_S, probs_SV, draws_S, least_S, None, config)
    return tokens_S


def _draw_into(
    tokens_S: Tensor,
    probs_SV: Tensor,
    draws_S: Tensor,
    least_S: Tensor | None,
    logits: tuple[Tensor, ...] | None,
    config: SamplingConfig,
) -> None:
    """`logits`: tops and places of their blocks, temperatures, and where validity is written."""
    num_rows, vocab_size = probs_SV.shape
    masses_SN = probs_SV.new_empty(num_rows, config.num_blocks, dtype=torch.int64)
    options = {"VOCAB": vocab_size, "BLOCK": config.block, "num_warps": config.num_warps}
    has_cut = least_S is not None
    kernel.block_masses[num_rows, config.num_blocks](
        probs_SV, least_S, masses_SN, **options, HAS_CUT=has_cut
    )
    kernel.draw_tokens[(num_rows,)](
        probs_SV,
        least_S,
        masses_SN,
        draws_S,
        tokens_S,
        *(logits or (None,) * 4),
        **options,
        NUM_BLOCKS=config.num_blocks,
        BLOCK_N=config.block_blocks,
        HAS_CUT=has_cut,
        HAS_LOGITS=logits is not None,
    )


def _check(rows_SV: Tensor) -> None:
    assert rows_SV.dtype == torch.float32, f"rows of the vocabulary are {rows_SV.dtype}, not fp32"
    assert rows_SV.is_contiguous(), f"rows of the vocabulary have strides {rows_SV.stride()}"


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
    """Returns the log probability of one token of each row, and its rank: 1 + the larger logits."""
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
    """Returns one number in [0, 1) per row, fp64, by (seed, choice, position) alone: Philox
    4x64-10.

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
