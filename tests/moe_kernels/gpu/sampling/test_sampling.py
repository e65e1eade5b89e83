"""The cut and the draw against the plain definition and the host's own cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.sampling import reference
from moe_kernels.gpu.sampling.api import draw, least_probabilities, sample
from moe_kernels.gpu.sampling.heuristics import SamplingConfig, sampling_config
from moe_kernels.gpu.sampling.sampling_rows import SamplingRows
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling import sampler

VOCAB = 300
ROOMY = SamplingConfig(block=128, num_blocks=3, block_blocks=4, num_warps=1, capacity=512)
TIGHT = replace(ROOMY, capacity=128)  # many cuts lie below the candidates
FILTERS = [
    (min_p, top_k, top_p)
    for min_p in (0.0, 0.05, 0.5)
    for top_k in (0, 5, 140, 1000)
    for top_p in (0.0, 0.3, 0.9, 1.0)
]


def make_rows(device: torch.device, filters: list[tuple[float, int, float]]) -> SamplingRows:
    min_ps, top_ks, top_ps = zip(*filters, strict=True)
    num = len(filters)
    draws = torch.rand(num, generator=torch.Generator().manual_seed(num), dtype=torch.float64)
    return SamplingRows(
        temperatures_S=torch.ones(num, device=device),
        draws_S=draws.to(device),
        min_ps_S=torch.tensor(min_ps, device=device),
        top_ks_S=torch.tensor(top_ks, dtype=torch.int32, device=device),
        top_ps_S=torch.tensor(top_ps, dtype=torch.float64, device=device),
    )


def make_logits(device: torch.device, kind: str, num: int) -> Tensor:
    logits = torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(num))
    if kind == "peaked":
        logits = logits * 4
    elif kind == "flat":
        logits = logits * 0.1
    elif kind == "tied":
        logits = (logits * 2).round()
    elif kind == "equal":
        logits = logits * 0
    elif kind == "banned":
        logits[:, 3:] = -math.inf
    return logits.to(device)


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    config: SamplingConfig


CASES = [
    *(Case(kind, TIGHT) for kind in ("usual", "peaked", "flat", "tied", "equal", "banned")),
    Case("usual", ROOMY),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.config.capacity}")
def test_the_cut_is_the_definitions(case: Case, device: torch.device) -> None:
    filters = FILTERS[CASES.index(case) :: len(CASES)]  # the interpreter is slow: each one once
    rows = make_rows(device, filters)
    logits = make_logits(device, case.kind, len(filters))
    probs = reference.probabilities(logits, rows.temperatures_S)
    least = least_probabilities(probs, probs.amax(-1), rows, case.config)
    expected = reference.least_probabilities(probs, rows)
    kept, wanted = probs >= least[:, None], probs >= expected[:, None]
    for row, (min_p, top_k, top_p) in enumerate(filters):
        told = f"{min_p=}, {top_k=}, {top_p=}: {kept[row].sum()} instead of {wanted[row].sum()}"
        assert torch.equal(kept[row], wanted[row]), told
    params = [SamplingParams(min_p=m, top_k=k, top_p=max(p, 1e-9)) for m, k, p in filters]
    server = sampler.least_probabilities(probs.cpu(), params).to(device)
    is_possible = probs > 0
    assert torch.equal((probs >= server) & is_possible, kept & is_possible), "not the server's cut"


@pytest.mark.parametrize("has_cut", [False, True], ids=["all", "cut"])
def test_the_draw_is_the_definitions(has_cut: bool, device: torch.device) -> None:
    draws = [0.0, 1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999999, 1 - 2.0**-53]
    logits = torch.cat([make_logits(device, kind, 9) for kind in ("usual", "tied", "banned")])
    draws_S = torch.tensor(draws * 3, dtype=torch.float64, device=device)
    probs = reference.probabilities(logits, torch.ones(27, device=device))
    least = probs.amax(-1) / 3 if has_cut else None
    tokens = draw(probs, draws_S, least, ROOMY)
    assert torch.equal(tokens, reference.draw(probs, draws_S, least))
    drawn = probs.gather(1, tokens[:, None])
    assert (drawn > 0).all() and (least is None or (drawn[:, 0] >= least).all())


def test_tokens_are_drawn_and_rows_stay_alone(device: torch.device) -> None:
    filters = [(0.0, 0, 1.0), (0.0, 40, 0.9), (0.1, 0, 0.8), (0.0, 3, 1.0), (0.0, 0, 0.95)]
    rows = make_rows(device, filters)
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.5, 1.0], device=device)
    rows = replace(rows, temperatures_S=temperatures)
    logits = make_logits(device, "usual", 5)
    logits[4, 7] = math.nan
    sampled = sample(logits, rows)
    assert sampled.is_valid_S.tolist() == [True, True, True, True, False]
    assert 0 <= int(sampled.tokens_S[4]) < VOCAB, "a faulty row's token is not one"
    probs = reference.probabilities(logits[:4], temperatures[:4])
    least = reference.least_probabilities(probs, _only(rows, slice(0, 4)))
    expected = reference.draw(probs, rows.draws_S[:4], least)
    expected[2] = logits[2].argmax()
    assert torch.equal(sampled.tokens_S[:4], expected)
    for row in range(5):
        alone = sample(logits[row : row + 1], _only(rows, slice(row, row + 1)))
        assert torch.equal(alone.tokens_S[0], sampled.tokens_S[row]), f"row {row} depends on others"
    unfiltered = sample(logits[:1], replace(_only(rows, slice(0, 1)), has_filter=False))
    assert torch.equal(unfiltered.tokens_S, sampled.tokens_S[:1]), "a filter that is off cuts"


def _only(rows: SamplingRows, part: slice) -> SamplingRows:
    return SamplingRows(
        temperatures_S=rows.temperatures_S[part],
        draws_S=rows.draws_S[part],
        min_ps_S=rows.min_ps_S[part],
        top_ks_S=rows.top_ks_S[part],
        top_ps_S=rows.top_ps_S[part],
    )


def test_greedy_takes_the_lowest_of_the_likeliest(device: torch.device) -> None:
    rows = replace(make_rows(device, [(0.0, 0, 1.0)] * 5), is_greedy=True)
    logits = make_logits(device, "usual", 5)
    logits[0, [290, 150, 149]] = 9.0
    logits[1, 299] = 9.0
    logits[2] = -math.inf
    logits[3, 5] = math.inf
    logits[4, 200] = math.nan
    sampled = sample(logits, rows)
    assert sampled.tokens_S[:2].tolist() == [149, 299]
    assert sampled.is_valid_S.tolist() == [True, True, False, False, False]
    assert ((sampled.tokens_S >= 0) & (sampled.tokens_S < VOCAB)).all()
    assert sample(logits[:0], make_rows_empty(device)).tokens_S.shape == (0,)


def make_rows_empty(device: torch.device) -> SamplingRows:
    return _only(make_rows(device, [(0.0, 0, 1.0)]), slice(0, 0))


def test_config_follows_the_vocabulary() -> None:
    assert sampling_config(151_936) == SamplingConfig(
        block=4096, num_blocks=38, block_blocks=64, num_warps=8
    )
    assert sampling_config(32_000).block == 512 and sampling_config(32_000).num_blocks == 63
    for vocab_size in (1, 127, 129, 200_019, 262_144, 2**20):
        config = sampling_config(vocab_size)
        covered = config.block * config.num_blocks
        assert vocab_size <= covered < vocab_size + config.block, f"{vocab_size}: {config}"
        assert config.num_blocks <= config.block_blocks <= 64, f"{vocab_size}: {config}"
