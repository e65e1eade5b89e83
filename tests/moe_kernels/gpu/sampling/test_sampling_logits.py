"""Penalties bit for bit, log probabilities, and numpy's draws."""

from __future__ import annotations

import math

import torch

from moe_kernels.gpu.sampling import reference
from moe_kernels.gpu.sampling.api import adjust, score_tokens, uniform
from moe_kernels.gpu.sampling.heuristics import SamplingConfig
from moe_kernels.gpu.sampling.sampling_rows import Adjustments
from moe_serve.engine.sampling.sampler import uniform as server_uniform


def test_draws_are_the_servers(device: torch.device) -> None:
    keys = [
        (seed, choice, position)
        for seed in (0, 1, 42, 2**63 + 12345, 2**64 - 1)
        for choice in (0, 3)
        for position in (0, 1, 100_000, 2**40)
    ]
    wrapped = [(s - 2**64 if s >= 2**63 else s, c, p) for s, c, p in keys]
    columns = torch.tensor(wrapped, dtype=torch.int64, device=device).t().contiguous()
    draws = uniform(*columns)
    assert draws.dtype == torch.float64
    assert draws.tolist() == [server_uniform(*key) for key in keys]
    assert uniform(*columns[:, :0]).shape == (0,)


def test_penalties_are_bit_for_bit(device: torch.device) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(device) * 3
    entries = [  # row, token, bias, count, is seen
        (0, 3, 0.0, 2, True),
        (0, 49, 0.0, 0, True),
        (0, 7, 1.5, 0, False),
        (1, 3, -math.inf, 1, True),
        (1, 0, -2.25, 5, True),
        (2, 8, 0.0, 3, True),
        (2, 9, 100.0, 0, True),
    ]
    rows, tokens, biases, counts, is_seen = zip(*entries, strict=True)
    adjustments = Adjustments(
        rows_M=torch.tensor(rows, device=device),
        tokens_M=torch.tensor(tokens, device=device),
        biases_M=torch.tensor(biases, device=device),
        counts_M=torch.tensor(counts, dtype=torch.int32, device=device),
        is_seen_M=torch.tensor(is_seen, device=device),
        repetitions_S=torch.tensor([1.3, 1.0, 0.7], device=device),
        presences_S=torch.tensor([0.0, 0.4, -0.3], device=device),
        frequencies_S=torch.tensor([0.7, 0.1, 0.0], device=device),
    )
    adjusted = logits.clone()
    adjust(adjusted, adjustments)
    assert torch.equal(adjusted, reference.adjust(logits, adjustments))
    is_touched = torch.zeros(3, 50, dtype=torch.bool)
    is_touched[list(rows), list(tokens)] = True
    assert torch.equal(adjusted[~is_touched], logits[~is_touched]), "another token was changed"
    assert adjusted[1, 3] == -math.inf


def test_scores_are_those_of_log_softmax(device: torch.device) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).to(device) * 4
    logits[2, 128:256] = -math.inf  # a block that cannot be
    tokens = torch.tensor([0, 299, 5, 128], device=device)
    config = SamplingConfig(block=128, num_blocks=3, block_blocks=4, num_warps=1)
    scores = score_tokens(logits, tokens, config)
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, tokens[:, None])
    torch.testing.assert_close(scores.logprobs_S, chosen[:, 0], rtol=1e-5, atol=1e-5)
    assert scores.ranks_S.tolist() == ((logprobs > chosen).sum(-1) + 1).tolist()
    for row in range(4):
        alone = score_tokens(logits[row : row + 1], tokens[row : row + 1], config)
        assert torch.equal(alone.logprobs_S[0], scores.logprobs_S[row]), f"row {row}"
