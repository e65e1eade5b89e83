"""Predicts which experts a micro-batch's rows will need in the next layer with routed experts.

T rows, E experts, K choices per row, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from routing_predictor.layers.recall_guard import RecallGuard
from routing_predictor.layers.router_residual import choice_odds
from routing_predictor.layers.train_layers import LayerPredictors

_MAX_ROWS = 32  # rows of a micro-batch that the predictor looks at
_EVERY = 16  # recall is measured in one of this many steps
_ONE = 255  # a probability of 1, as predictions are sent


class NextLayer:
    """Predicts the next layer's experts from the residual stream, so that an expert memory can read
    ahead.

    It changes no results. Below the guard's floor it predicts nothing, and computes only in the
    steps in which recall is measured.
    """

    def __init__(
        self, predictors: LayerPredictors, layers: Sequence[int], top_k: int, guard: RecallGuard
    ) -> None:
        """`layers`: the layers with routed experts, in order."""
        assert predictors.targets == tuple(layers[1:]), f"predictors of {predictors.targets}"
        self._predictors, self._top_k, self._guard = predictors, top_k, guard
        self._first, self._following = layers[0], dict(zip(layers, layers[1:], strict=False))
        self._said: dict[int, tuple[int, Tensor]] = {}  # by micro-batch: layer and top K, [T, K]
        self._num_steps = 0

    @property
    def _is_measuring(self) -> bool:
        return self._num_steps % _EVERY == 1

    def of(
        self, layer: int, micro_batch: int, hidden_TD: Tensor, expert_ids_TK: Tensor
    ) -> Tensor | None:
        """Predicts from rows that enter a layer's router and from the router's choices.

        Returns uint8 [E]: the probability, in units of 1/255, that the next layer needs each
        expert. None means no prediction.
        """
        if layer == self._first and micro_batch == 0:
            self._num_steps += 1
        num_rows, said = hidden_TD.shape[0], self._said.pop(micro_batch, None)
        if not num_rows or not (self._guard.is_on or self._is_measuring):
            return None
        some = slice(None, None, -(-num_rows // _MAX_ROWS))
        chosen_TK = expert_ids_TK[some]
        # otherwise it is from a step that failed, or rows have joined or left since then
        if said is not None and said[0] == layer and len(said[1]) == len(chosen_TK):
            self._measure(said[1], chosen_TK)
        following = self._following.get(layer)
        if following is None:
            return None
        logits_TE = self._predictors.predict(following, hidden_TD[some])
        if self._is_measuring:
            self._said[micro_batch] = (following, logits_TE.topk(self._top_k).indices)
        if not self._guard.is_on:
            return None
        return self._needed(logits_TE, num_rows)

    def _needed(self, logits_TE: Tensor, num_rows: int) -> Tensor:
        """Returns the probability that at least one row needs each expert: 1 - prod (1 - p).

        Rows that were not looked at are taken to be like the others.
        """
        spared_TE = F.softplus(choice_odds(logits_TE, self._top_k))  # - log (1 - p)
        share = -num_rows / len(logits_TE)
        return (torch.expm1(spared_TE.sum(0) * share) * -_ONE).round().to(torch.uint8)

    def _measure(self, said_TK: Tensor, chosen_TK: Tensor) -> None:
        hits = (said_TK[:, :, None] == chosen_TK[:, None]).sum()
        self._guard.measure(float(hits) / chosen_TK.numel(), len(chosen_TK))


def together(parts: Sequence[Tensor]) -> Tensor | None:
    """Combines the predictions for several micro-batches, uint8 [E] each as returned by
    `NextLayer.of`.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    spared_PE = 1 - torch.stack(list(parts)).float() / _ONE
    return ((1 - spared_PE.prod(0)) * _ONE).round().to(torch.uint8)
