"""Trains the predictors between layers: one `RouterResidual` per predicted layer.

Their inputs and targets are taken from captured hidden states (`layer_data`).

N tokens, D model width, K choices, E experts, L predicted layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routing_predictor.layers.router_residual import (
    NUM_CONTEXT,
    RouterResidual,
    RouterWeights,
    context_of,
)
from routing_predictor.traces.card import PredictorKind
from routing_predictor.traces.fitting import Progress, Recipe, Task, TrainingCourse, fit

Loss = Literal["router", "ranked"]
_MARGIN, _HINGE = 0.1, 0.3
_WEIGHTS = (3.0, 1.5, 0.5)  # of the chosen, of the runners-up to 3k, of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerData:
    """Inputs of one predicted layer's predictor, and the choices of its router."""

    hidden_ND: Tensor  # fp16: the earlier residual stream
    router_input_ND: Tensor  # fp16: the stream that the layer's own router read
    ids_NK: Tensor  # int64: the router's choices
    context_NC: Tensor | None = None  # fp16


def train_layer(
    router: RouterWeights,
    learnt: LayerData,
    held_out: LayerData,
    recipe: Recipe,
    progress: Progress,
    *,
    num_hidden: int,
    loss: Loss = "router",
) -> tuple[RouterResidual, TrainingCourse]:
    torch.manual_seed(recipe.seed)
    context = learnt.context_NC
    width = 0 if context is None else context.shape[1]
    module = RouterResidual(router, num_hidden, width)
    module.fit_scale(learnt.hidden_ND[: 2**15])
    whole = torch.arange(len(held_out.ids_NK))

    @torch.inference_mode()
    def held_out_loss() -> float:
        losses = [
            layer_loss(module, held_out, part, loss) * len(part) for part in whole.split(4096)
        ]
        return float(torch.stack(losses).sum()) / len(whole)

    task = Task(
        num_samples=len(learnt.ids_NK),
        loss=lambda samples: layer_loss(module, learnt, samples, loss),
        held_out=held_out_loss,
        name=f"layer {router.layer}",
    )
    return module, fit(module, task, recipe, progress)


def layer_loss(module: RouterResidual, data: LayerData, samples: Tensor, loss: Loss) -> Tensor:
    """Returns the training loss. `router`: the divergence from the router's own distribution over
    all experts. `ranked`: weighted BCE by rank and a pairwise hinge, which use only the choice and
    its runners-up."""
    context = None if data.context_NC is None else data.context_NC[samples]
    logits_NE = module(data.hidden_ND[samples], context)
    router = module.router
    true_NE = router.logits(router.normed(data.router_input_ND[samples]))
    if loss == "router":
        return F.kl_div(
            logits_NE.log_softmax(-1),
            true_NE.log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
    return ranked_loss(logits_NE, true_NE, data.ids_NK[samples])


def ranked_loss(logits_NE: Tensor, true_NE: Tensor, ids_NK: Tensor) -> Tensor:
    """BCE with the weights 3, 1.5, 0.5 by rank, plus 0.3 times a hinge between every chosen and
    every other expert with the margin 0.1."""
    top_k = ids_NK.shape[1]
    is_chosen_NE = torch.zeros_like(logits_NE).scatter_(1, ids_NK, 1.0)
    rank_NE = true_NE.argsort(dim=-1, descending=True).argsort(dim=-1)
    weight_NE = torch.where(rank_NE < 3 * top_k, _WEIGHTS[1], _WEIGHTS[2])
    weight_NE = torch.where(is_chosen_NE > 0, _WEIGHTS[0], weight_NE)
    bce = F.binary_cross_entropy_with_logits(logits_NE, is_chosen_NE, weight_NE)
    gap_NKE = logits_NE.gather(1, ids_NK)[:, :, None] - logits_NE[:, None]
    hinge_NKE = F.relu(_MARGIN - gap_NKE) * (1 - is_chosen_NE)[:, None]
    num_pairs = top_k * (logits_NE.shape[1] - top_k)
    return bce + _HINGE * hinge_NKE.sum((1, 2)).mean() / max(1, num_pairs)


class LayerPredictors(nn.Module):
    """The predictors of L layers, as stored in one file."""

    def __init__(self, layers: Sequence[RouterResidual]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(each.router.layer): each for each in layers})

    @property
    def targets(self) -> tuple[int, ...]:
        """The predicted layers, by the model's numbers."""
        return tuple(int(name) for name in self.layers)

    def predict(self, layer: int, hidden_TD: Tensor, context_TC: Tensor | None = None) -> Tensor:
        """Returns [T, E]: logits of the layer's coming choices."""
        logits: Tensor = self.layers[str(layer)](hidden_TD, context_TC)
        return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """Tokens of whole texts, text after text."""

    before_attention_LND: Tensor  # fp16: the residual stream that enters each layer
    before_router_LND: Tensor  # fp16: the residual stream after its attention
    ids_NLK: Tensor  # int64
    position_N: Tensor  # int64


def predicted_pairs(kind: PredictorKind, num_layers: int) -> list[tuple[int, int]]:
    """Returns (layer that is read, layer that is predicted), as indices of layers with routed
    experts."""
    if kind is PredictorKind.NEXT_LAYER:
        return [(layer, layer + 1) for layer in range(num_layers - 1)]
    return [(layer, layer) for layer in range(num_layers)]


def layer_data(
    kind: PredictorKind, source: LayerSource, read: int, target: int, rows_N: Tensor
) -> LayerData:
    """Takes the data of some of the tokens."""
    is_early = kind is PredictorKind.PRE_ATTENTION
    hidden_LND = source.before_attention_LND if is_early else source.before_router_LND
    context_NC = None
    if is_early:
        context_NC = context_of(hidden_LND[read], source.position_N, NUM_CONTEXT)[rows_N]
    return LayerData(
        hidden_ND=hidden_LND[read][rows_N],
        router_input_ND=source.before_router_LND[target][rows_N],
        ids_NK=source.ids_NLK[rows_N, target],
        context_NC=context_NC,
    )
