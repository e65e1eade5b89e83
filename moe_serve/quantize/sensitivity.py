"""Chooses the layers whose experts are stored in int8 rather than in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_serve.learn.documents import TextPiece
from moe_serve.quantize.layer_quantizer import LayerQuantizer
from moe_serve.quantize.layer_runs import (
    HiddenStates,
    OutputHead,
    base_bank,
    layer_stage,
    make_batches,
)
from moe_serve.quantize.quantise_plan import QuantisePlan

_MAX_TOKENS = 4096


def layer_divergences(
    quantizer: LayerQuantizer,
    plan: QuantisePlan,
    pieces: Sequence[TextPiece],
    progress: Callable[[int], None],
) -> list[float]:
    """Returns for each layer the mean KL divergence, in nats a token, of the model in which this
    layer alone is rounded, from the original.

    All these models are carried through the layers together, so each layer is loaded once.
    """
    texts, num_tokens = [], 0
    for piece in pieces:
        if num_tokens < _MAX_TOKENS:
            texts.append(piece.tokens)
            num_tokens += len(piece.tokens)
    base = HiddenStates.embed(quantizer.base, make_batches(texts))
    changed: list[HiddenStates] = []
    for layer, planned in enumerate(plan.layers):
        result = quantizer.round(layer, planned)
        rounded, stage = base.copy(), quantizer.stage(result)
        rounded.attend(stage)
        rounded.feed_forward(stage, quantizer.bank(result))
        stage = layer_stage(quantizer.base, layer, quantizer.max_positions)
        bank = base_bank(quantizer.base, layer)
        for states in (base, *changed):
            states.attend(stage)
            states.feed_forward(stage, bank)
        changed.append(rounded)
        progress(layer)
    head, totals = OutputHead(quantizer.base), [0.0] * len(changed)
    for before_TD, *others in zip(base.pieces(), *(c.pieces() for c in changed), strict=True):
        before_TV = head.log_probabilities(before_TD)
        for layer, after_TD in enumerate(others):
            difference_TV = before_TV - head.log_probabilities(after_TD)
            totals[layer] += float((before_TV.exp() * difference_TV).double().sum())
    return [total / max(1, num_tokens) for total in totals]


def int8_layers(divergences: Sequence[float], budget: float) -> frozenset[int]:
    """Returns the layers with the largest divergences: as few as possible, so that the divergences
    of the other layers add up to at most `budget`.
    """
    order = sorted(range(len(divergences)), key=lambda layer: -divergences[layer])
    left, chosen = sum(divergences), set[int]()
    for layer in order:
        if left <= budget:
            break
        left -= divergences[layer]
        chosen.add(layer)
    return frozenset(chosen)
