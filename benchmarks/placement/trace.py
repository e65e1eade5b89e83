"""Reads a recorded routing of gpt-oss-20b, and splits it in two halves by prompt.

N tokens, L layers, K choices. The npz has `experts` [N, L, K], `sample` [N] and `sample_name`. The
last field of a name (fields are separated by bars) says whether the answer repeats itself; such
answers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.placement.problem.loads import ExpertLoads
from experts.placement.problem.token_choices import TokenChoices

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
    """Read both halves from the npz of the trace."""
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
