"""The inputs and targets of the predictors between layers, taken from captured hidden states.

L layers with routed experts, N tokens, K choices, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from routing_predictor.layers.router_residual import NUM_CONTEXT, context_of
from routing_predictor.layers.train_layers import LayerData
from routing_predictor.traces.card import PredictorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """Tokens of whole texts, text after text."""

    before_attention_LND: Tensor  # fp16: the residual stream that enters each layer
    before_router_LND: Tensor  # fp16: the residual stream after its attention
    ids_NLK: Tensor  # int64
    position_N: Tensor  # int64


def predicted_pairs(kind: PredictorKind, num_layers: int) -> list[tuple[int, int]]:
    """Return (layer that is read, layer that is predicted), as indices of layers with routed
    experts."""
    if kind is PredictorKind.NEXT_LAYER:
        return [(layer, layer + 1) for layer in range(num_layers - 1)]
    return [(layer, layer) for layer in range(num_layers)]


def layer_data(
    kind: PredictorKind, source: LayerSource, read: int, target: int, rows_N: Tensor
) -> LayerData:
    """Take the data of some of the tokens."""
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
