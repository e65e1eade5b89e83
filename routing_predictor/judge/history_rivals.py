"""Predictions from the routing alone, for traces without token ids: what the last tokens chose.

S samples, L layers, E experts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from routing_predictor.judge.evaluate import Truth, Verdict, judge
from routing_predictor.judge.request_rivals import judged_history, truth_of
from routing_predictor.requests.prefix_samples import PrefixCuts, cut_each
from routing_predictor.requests.request_mlp import as_probability
from routing_predictor.requests.texts import RoutedTexts
from routing_predictor.requests.train_request import history_shares, train_request
from routing_predictor.traces.fitting import Progress, Recipe
from routing_predictor.traces.trace import RoutingTrace

HALF_LIFE = 64  # tokens
_CUTS_PER_TEXT = 4
_RECIPE = Recipe(epochs=12, batch_size=128, learning_rate=1e-3, weight_decay=0.3)


def judge_history(
    seen: RoutedTexts, unseen: RoutedTexts, trace: RoutingTrace, seed: int, progress: Progress
) -> list[Verdict]:
    """Baselines, a decaying histogram and a learnt MLP, on requests that none of them has seen."""
    cuts = cut_each(unseen, _CUTS_PER_TEXT, seed=seed)
    truth = truth_of(cuts, trace.layers)
    count_LE = load_of(seen)
    return [
        _learnt(seen, cuts, truth, seed, progress),
        *judged_history(count_LE, cuts, trace.layers),
        judge("decaying histogram", decaying(cuts, count_LE) * truth.top_k, truth),
    ]


def load_of(texts: RoutedTexts) -> NDArray[np.int64]:
    """[L, E]: how often each expert was chosen."""
    num_layers = texts.expert_ids_TLK.shape[1]
    counts = [
        np.bincount(texts.expert_ids_TLK[:, layer].ravel(), minlength=texts.num_experts)
        for layer in range(num_layers)
    ]
    return np.array(counts, dtype=np.int64)


def decaying(
    cuts: PrefixCuts, count_LE: NDArray[np.integer], half_life: int = HALF_LIFE
) -> NDArray[np.float64]:
    """[S, L, E]: a histogram that forgets, as a server keeps it with one multiplication per token;
    it starts from the marginal, worth a quarter of a half-life."""
    prior_LE = count_LE / np.maximum(count_LE.sum(-1, keepdims=True), 1)
    num_experts = cuts.texts.num_experts
    scores = []
    for start, end in zip(cuts.start_S, cuts.end_S, strict=True):
        start = max(start, end - 8 * half_life)
        ids_TLK = cuts.texts.expert_ids_TLK[start:end].astype(np.int64)
        weight_T = 0.5 ** (np.arange(end - start)[::-1] / half_life)
        num_layers, top_k = ids_TLK.shape[1:]
        place = ids_TLK + num_experts * np.arange(num_layers)[None, :, None]
        weights = np.broadcast_to(weight_T[:, None, None], ids_TLK.shape)
        sums = np.bincount(place.ravel(), weights.ravel(), num_layers * num_experts)
        sums_LE = sums.reshape(num_layers, num_experts) + prior_LE * (top_k * half_life / 4)
        scores.append(sums_LE / sums_LE.sum(-1, keepdims=True))
    return np.stack(scores)


def _learnt(
    seen: RoutedTexts, cuts: PrefixCuts, truth: Truth, seed: int, progress: Progress
) -> Verdict:
    recipe = replace(_RECIPE, seed=seed)
    mlp, _ = train_request(seen, history_shares, recipe, progress)
    with torch.inference_mode():
        shares = mlp(history_shares(cuts).float()).softmax(-1)
    return judge("MLP on the history", as_probability(shares, truth.top_k).numpy(), truth)
