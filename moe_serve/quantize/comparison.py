"""Compares a quantised model with the original on held-out texts, layer by layer and in the end.

T tokens, V vocabulary. Both models run side by side, one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_serve.learn.documents import TextPiece
from moe_serve.model.load.loader import ModelLoader
from moe_serve.quantize.layer_quantizer import LayerQuantizer, RoundedLayer
from moe_serve.quantize.layer_runs import (
    HiddenStates,
    OutputHead,
    base_bank,
    layer_stage,
    make_batches,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainFigures:
    """The figures of one domain's held-out tokens.

    `kl`: mean KL divergence of the quantised model's distribution from the original's, in nats.
    `top1`: share of tokens after which both find the same token most likely.
    """

    domain: str
    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    kl: float
    top1: float

    @property
    def ratio(self) -> float:
        return self.perplexity_after / self.perplexity_before


class Comparison:
    """Runs held-out texts through both models."""

    def __init__(self, quantizer: LayerQuantizer, pieces: Sequence[TextPiece]) -> None:
        self._quantizer = quantizer
        self._pieces = [piece for piece in pieces if len(piece.tokens) > 1]
        batches = make_batches([piece.tokens for piece in self._pieces])
        self._base = HiddenStates.embed(quantizer.base, batches)
        self._changed = self._base.copy()
        self.rerouted: list[float | None] = []  # by layer: share of tokens with other experts

    def pass_layer(self, result: RoundedLayer) -> None:
        """Takes both through a layer."""
        quantizer, layer = self._quantizer, result.layer
        stage = layer_stage(quantizer.base, layer, quantizer.max_positions)
        self._base.attend(stage)
        before = self._base.feed_forward(stage, base_bank(quantizer.base, layer))
        stage = quantizer.stage(result)
        self._changed.attend(stage)
        after = self._changed.feed_forward(stage, quantizer.bank(result))
        self.rerouted.append(_share_of_other_rows(before, after))

    def figures(self, changed: ModelLoader) -> list[DomainFigures]:
        """Returns the figures by domain, after the last layer; `changed` has the rounded head."""
        base_head, changed_head = OutputHead(self._quantizer.base), OutputHead(changed)
        targets_T = torch.cat([_next_tokens(piece) for piece in self._pieces])
        labels = sorted({piece.label for piece in self._pieces})
        label_T = torch.cat(
            [torch.full((len(p.tokens),), labels.index(p.label)) for p in self._pieces]
        )
        sums_L = torch.zeros(len(labels), 5, dtype=torch.float64)
        start = 0
        for base_TD, changed_TD in zip(self._base.pieces(), self._changed.pieces(), strict=True):
            rows = slice(start, start + len(base_TD))
            start += len(base_TD)
            first_TV = base_head.log_probabilities(base_TD)
            second_TV = changed_head.log_probabilities(changed_TD)
            found_T5 = _token_figures(first_TV, second_TV, targets_T[rows])
            sums_L.index_add_(0, label_T[rows], found_T5)
        return [
            _domain_figures(label, sums.tolist())
            for label, sums in zip(labels, sums_L, strict=True)
        ]


def _share_of_other_rows(before: Sequence[Tensor], after: Sequence[Tensor]) -> float | None:
    if not before:
        return None
    changed = [(a != b).any(-1) for a, b in zip(before, after, strict=True)]
    return float(torch.cat(changed).double().mean())


_END = -1  # in place of the token after the last one of a piece


def _next_tokens(piece: TextPiece) -> Tensor:
    return torch.from_numpy(np.append(piece.tokens[1:], _END))


def _token_figures(first_TV: Tensor, second_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Returns for each token [T, 5]: 1, both models' negative log-likelihoods, the divergence, and
    whether both find the same token most likely; zeros after the end of a piece.
    """
    is_inside_T = targets_T != _END
    targets_T1 = targets_T.clamp_min(0)[:, None]
    columns = (
        torch.ones(len(targets_T)),
        -first_TV.gather(1, targets_T1)[:, 0],
        -second_TV.gather(1, targets_T1)[:, 0],
        (first_TV.exp() * (first_TV - second_TV)).sum(-1),
        (first_TV.argmax(-1) == second_TV.argmax(-1)).float(),
    )
    return torch.stack(columns, 1).double() * is_inside_T[:, None]


def _domain_figures(label: str, sums: list[float]) -> DomainFigures:
    num_tokens, before, after, kl, equal = sums
    return DomainFigures(
        domain=label,
        num_tokens=int(num_tokens),
        perplexity_before=math.exp(before / num_tokens),
        perplexity_after=math.exp(after / num_tokens),
        kl=kl / num_tokens,
        top1=equal / num_tokens,
    )
