"""Measures how the domains share the experts.

N domains, L layers, E experts. Every domain has the same weight, whatever the length of its text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEARLY_DEAD = 0.1  # of the even share 1 / E


@dataclass(frozen=True, slots=True)
class LayerUse:
    """The use of experts in one layer, as shares of a domain's choices; 1 / E is even."""

    information_bits: float  # between domain and expert; 0 if all domains use experts alike
    top_share: float  # of a domain's choices, on its own `top` most used experts; mean over domains
    distance: (
        float  # total variation between two domains' use, mean over pairs; 0 alike, 1 disjoint
    )
    least_used: float  # the least used expert's share, as a multiple of the even share
    most_used: float
    num_nearly_dead: int
    num_dead: int


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """The use of experts in all domains, from counts of router choices."""

    domains: tuple[str, ...]
    share: Tensor  # [N, L, E] fp64; sums to 1 over E
    top: int

    @classmethod
    def of(cls, choices: dict[str, Tensor], top: int) -> ExpertUse:
        """Builds the use from each domain's counts [L, E]."""
        stacked = torch.stack(list(choices.values())).double()
        return cls(tuple(choices), stacked / stacked.sum(-1, keepdim=True), top)

    def layers(self) -> list[LayerUse]:
        return [self._layer(self.share[:, i]) for i in range(self.share.shape[1])]

    def _layer(self, share_NE: Tensor) -> LayerUse:
        pooled_E = share_NE.mean(0)
        relative_E = pooled_E * pooled_E.numel()
        information = _entropy(pooled_E) - _entropy(share_NE).mean()
        pairs = torch.combinations(torch.arange(len(share_NE)))
        distances = (share_NE[pairs[:, 0]] - share_NE[pairs[:, 1]]).abs().sum(-1) / 2
        return LayerUse(
            information_bits=float(information),
            top_share=float(share_NE.topk(self.top, dim=-1).values.sum(-1).mean()),
            distance=float(distances.mean()),
            least_used=float(relative_E.min()),
            most_used=float(relative_E.max()),
            num_nearly_dead=int((relative_E < NEARLY_DEAD).sum()),
            num_dead=int((pooled_E == 0).sum()),
        )

    def closest_and_farthest(self) -> tuple[tuple[str, str, float], tuple[str, str, float]]:
        """Returns the pairs of domains with the smallest and the largest distance, mean over
        layers."""
        pairs = []
        for i, first in enumerate(self.domains):
            for j in range(i + 1, len(self.domains)):
                gap_LE = (self.share[i] - self.share[j]).abs()
                pairs.append((first, self.domains[j], float(gap_LE.sum(-1).mean()) / 2))
        pairs.sort(key=lambda pair: pair[2])
        return pairs[0], pairs[-1]


def _entropy(share_E: Tensor) -> Tensor:
    """Returns the entropy in bits, over the last dimension."""
    nats: Tensor = -torch.special.xlogy(share_E, share_E).sum(-1)
    return nats / math.log(2)
