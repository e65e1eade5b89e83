"""The loads of the benchmark: invented ones with the statistics that were measured on DeepSeek-V3,
from a fixed seed, and a recorded routing of gpt-oss-20b, split in two halves by prompt.

S scenarios, L layers, E experts, F domains, N tokens, K choices.

Zipf loads: the expert of rank r has the weight r^-0.8, in random order, and a million choices are
drawn. This overstates skew. Workloads: each layer has a common popularity (log-normal), and each of
four domains (for example code, chat, mathematics, other languages) adds its own. A workload mixes
the domains unevenly and is prefill or decode, which shift some experts too. The hottest expert
therefore has 5 to 10 times the mean. Workloads are 0.03 to 0.2 apart in total variation, and those
of one kind are close to each other.

The npz of the recording has `experts` [N, L, K], `sample` [N] and `sample_name`. The last field of
a name (fields are separated by bars) says whether the answer repeats itself; such answers are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.loads import ExpertLoads, TokenChoices

Floats = NDArray[np.float64]
SEED = 20240601
_COMMON, _DOMAIN, _PHASE = 0.70, 0.60, 0.15  # standard deviations of logarithms
_NUM_DOMAINS = 4
_NUM_DRAWS = 2_000_000


def zipf_loads(num_layers: int, num_experts: int, exponent: float = 0.8) -> ExpertLoads:
    """Returns the loads of one scenario."""
    random = np.random.default_rng(SEED)
    weights_E = 1.0 / np.arange(1, num_experts + 1) ** exponent
    counts_LE = np.stack(
        [
            random.multinomial(1_000_000, random.permutation(weights_E / weights_E.sum()))
            for _ in range(num_layers)
        ]
    )
    return _loads(counts_LE[None].astype(np.float64))


def workloads(num_scenarios: int, num_layers: int, num_experts: int) -> ExpertLoads:
    """Returns scenarios of which half are prefill and half decode."""
    random = np.random.default_rng(SEED)
    common_LE = random.normal(0, _COMMON, (num_layers, num_experts))
    domains_FLE = random.normal(0, _DOMAIN, (_NUM_DOMAINS, num_layers, num_experts))
    phase_LE = random.normal(0, _PHASE, (num_layers, num_experts))
    popularity_FLE = np.exp(common_LE + domains_FLE)
    popularity_FLE /= popularity_FLE.sum(axis=2, keepdims=True)
    counts = []
    for scenario in range(num_scenarios):
        mix_F = random.dirichlet(np.full(_NUM_DOMAINS, 0.8))
        sign = 1.0 if scenario % 2 else -1.0
        share_LE = np.einsum("f,fle->le", mix_F, popularity_FLE) * np.exp(sign * phase_LE)
        share_LE /= share_LE.sum(axis=1, keepdims=True)
        counts.append([random.multinomial(_NUM_DRAWS, share_E) for share_E in share_LE])
    return _loads(np.array(counts, dtype=np.float64))


def distances(loads: ExpertLoads) -> Floats:
    """Returns the total variation [S, S] between scenarios, as mean over layers.

    This is the share of choices that would have to go to another expert.
    """
    shares_SLE = loads.shares_SLE()
    return np.stack(
        [np.abs(shares_SLE - shares_LE).sum(axis=2).mean(axis=1) / 2 for shares_LE in shares_SLE]
    )


def _loads(counts_SLE: Floats) -> ExpertLoads:
    names = tuple(f"{('decode', 'prefill')[s % 2]} {s // 2}" for s in range(len(counts_SLE)))
    return ExpertLoads(
        counts_SLE=counts_SLE, layers=tuple(range(counts_SLE.shape[1])), scenarios=names
    )


_NUM_EXPERTS, _NUM_GROUPS = 32, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """All tokens, those of even prompts, and those of odd prompts.

    For the first half there are also the loads of its prompts in four groups, as scenarios.
    """

    whole: TokenChoices
    planned: TokenChoices
    held_out: TokenChoices
    planned_groups: ExpertLoads


def read_halves(path: Path) -> Halves:
    """Reads both halves from the npz of the trace."""
    with np.load(path, allow_pickle=False) as archive:
        experts_NLK, sample_N = archive["experts"], archive["sample"]
        repeats = np.array([name.split("|")[-1] == "True" for name in archive["sample_name"]])
    kept_N = ~repeats[sample_N]
    experts_NLK, sample_N = experts_NLK[kept_N], sample_N[kept_N]
    # Prompts are numbered anew, so that both halves have as many.
    prompt_N = np.unique(sample_N, return_inverse=True)[1]
    half_N, group_N = prompt_N % 2, prompt_N // 2 % _NUM_GROUPS
    groups = [
        _choices(experts_NLK[(half_N == 0) & (group_N == group)]).loads(f"group {group}")
        for group in range(_NUM_GROUPS)
        if ((half_N == 0) & (group_N == group)).any()
    ]
    return Halves(
        whole=_choices(experts_NLK),
        planned=_choices(experts_NLK[half_N == 0]),
        held_out=_choices(experts_NLK[half_N == 1]),
        planned_groups=ExpertLoads(
            counts_SLE=np.concatenate([group.counts_SLE for group in groups]),
            layers=groups[0].layers,
            scenarios=tuple(group.scenarios[0] for group in groups),
        ),
    )


def _choices(experts_NLK: NDArray[np.integer]) -> TokenChoices:
    return TokenChoices(
        expert_ids_NLK=experts_NLK,
        num_experts=_NUM_EXPERTS,
        layers=tuple(range(experts_NLK.shape[1])),
    )
