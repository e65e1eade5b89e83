"""Judges predictors beside the simple rivals that they must beat, on the same samples.

The rivals of the request predictor use the tokens of a prefix; those for traces without token ids
use the choices of the last tokens; those of the predictors between layers use every single token.
S samples, N tokens, L layers, K choices, E experts, F features. A baseline gives scores [S, L, E]
that sum to 1 in a layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routing_predictor.judge.evaluate import PredictorVerdict, Truth, is_among, judge, share
from routing_predictor.requests.request_mlp import PrefixPools, RequestPredictor, as_probability
from routing_predictor.requests.texts import RoutedTexts
from routing_predictor.requests.train_request import (
    PrefixCuts,
    cut_each,
    cut_texts,
    history_shares,
    pooled,
    train_request,
)
from routing_predictor.traces.fitting import Progress, Recipe
from routing_predictor.traces.trace import RoutingTrace

Floats = NDArray[np.floating]

_NUM_DRAWS, _MAX_ITERATIONS = 4, 40  # of the regression
_INVERSE_PENALTY = 1e-4  # the best of 1e-2, ..., 1e-5 on the demonstration model
HISTORY_WEIGHT = 64.0  # choices of history that weigh as much as the marginal, in `blended`
CUTS_PER_TEXT = 8
_CUTS_TO_FIT = 8_000  # samples of the logistic regression
_AT_ONCE = 256
HALF_LIFE = 64  # tokens
_HISTORY_CUTS_PER_TEXT = 4
_HISTORY_RECIPE = Recipe(epochs=12, batch_size=128, learning_rate=1e-3, weight_decay=0.3)


def marginal(count_LE: NDArray[Any], num_samples: int) -> Floats:
    """Scores experts by how often they are chosen at all, in every layer."""
    frequency_LE = share(count_LE, count_LE.sum(-1, keepdims=True))
    repeated: Floats = np.broadcast_to(frequency_LE, (num_samples, *frequency_LE.shape))
    return repeated


def from_history(history_SLE: NDArray[Any]) -> Floats:
    """Scores experts by the choices of the prefix's own tokens."""
    return share(history_SLE, history_SLE.sum(-1, keepdims=True))


def blended(history_SLE: NDArray[Any], count_LE: NDArray[Any]) -> Floats:
    """Combines history with the marginal as its prior, because a short prefix says little."""
    prior_LE = share(count_LE, count_LE.sum(-1, keepdims=True)) * HISTORY_WEIGHT
    return from_history(history_SLE + prior_LE[None])


def logistic_regression(
    features_SF: Floats,
    count_SLE: NDArray[Any],
    unseen_UF: Floats,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _what, _share: None,
) -> Floats:
    """Returns [U, L, E]: one multinomial regression per layer on the pooled embedding
    (scikit-learn), of single choices: sample s is of class e as often as expert e was used after
    it. To limit the cost, four choices are drawn from each sample."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(features_SF)
    seen_SF, unseen = scaler.transform(features_SF), scaler.transform(unseen_UF)
    num_samples, num_layers, num_experts = count_SLE.shape
    scores = np.zeros((len(unseen), num_layers, num_experts))
    rng = np.random.default_rng(seed)
    for layer in range(num_layers):
        what = f"logistic regression on {num_samples} prefixes, layer {layer + 1} of {num_layers}"
        progress(what, layer / num_layers)
        share_SE = count_SLE[:, layer] / count_SLE[:, layer].sum(-1, keepdims=True)
        chosen = (rng.random((_NUM_DRAWS, num_samples, 1)) > share_SE.cumsum(-1)).sum(-1)
        chosen = chosen.clip(0, num_experts - 1)
        if chosen.min() == chosen.max():  # a regression needs two classes
            scores[:, layer, chosen.min()] = 1.0
            continue
        model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=_MAX_ITERATIONS)
        with warnings.catch_warnings():
            # the result of 40 steps is used as it is
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(np.tile(seen_SF, (_NUM_DRAWS, 1)), chosen.reshape(-1))
        scores[:, layer, model.classes_] = model.predict_proba(unseen)
    return scores


def truth_of(cuts: PrefixCuts, layers: tuple[int, ...]) -> Truth:
    return Truth(
        count_SLE=cuts.coming(),
        num_tokens=cuts.horizon,
        top_k=cuts.texts.expert_ids_TLK.shape[2],
        document_S=cuts.documents,
        label_S=tuple(cuts.texts.label[request] for request in cuts.request_S),
        layers=layers,
    )


def judged_predictor(
    predictor: RequestPredictor, cuts: PrefixCuts, layers: tuple[int, ...]
) -> PredictorVerdict:
    prefixes = [prefix.astype(np.int64) for prefix in cuts.prefixes()]
    parts = [
        predictor.predict(prefixes[first : first + _AT_ONCE])
        for first in range(0, len(prefixes), _AT_ONCE)
    ]
    return judge("request predictor", np.concatenate(parts), truth_of(cuts, layers))


def judged_history(
    seen_count_LE: NDArray[np.integer], cuts: PrefixCuts, layers: tuple[int, ...]
) -> list[PredictorVerdict]:
    """Judges the baselines that read only choices. `seen_count_LE` counts the texts they may learn
    from."""
    truth, history = truth_of(cuts, layers), cuts.history()
    top_k, last = truth.top_k, cuts.history(1).astype(np.float64)
    return [
        judge("marginal", marginal(seen_count_LE, cuts.num_samples) * top_k, truth),
        judge("previous token", last, truth, is_probability=False),
        judge("history of the prefix", from_history(history) * top_k, truth),
        judge("history + marginal", blended(history, seen_count_LE) * top_k, truth),
        judge("half the answer (no baseline)", from_history(_first_half(cuts)) * top_k, truth),
    ]


def _first_half(cuts: PrefixCuts) -> NDArray[np.int64]:
    """Returns the choices of the first half of the coming tokens, which show how well the other
    half can be predicted at best."""
    return np.stack([cuts.counts(end, end + cuts.horizon // 2) for end in cuts.end_S])


def judged_regression(
    seen: RoutedTexts,
    cuts: PrefixCuts,
    pools: PrefixPools,
    layers: tuple[int, ...],
    seed: int,
    progress: Progress,
) -> PredictorVerdict:
    """Judges a logistic regression on the same pooled embeddings."""
    truth = truth_of(cuts, layers)
    fitted = cut_texts(seen, _CUTS_TO_FIT, seed=seed, horizon=cuts.horizon)
    scores = logistic_regression(
        pooled(fitted, pools).float().numpy(),
        fitted.coming(),
        pooled(cuts, pools).float().numpy(),
        seed,
        progress,
    )
    return judge("logistic regression", scores * truth.top_k, truth)


def cuts_to_judge(texts: RoutedTexts, seed: int, horizon: int) -> PrefixCuts:
    return cut_each(texts, CUTS_PER_TEXT, seed=seed, horizon=horizon)


def judge_history(
    seen: RoutedTexts, unseen: RoutedTexts, trace: RoutingTrace, seed: int, progress: Progress
) -> list[PredictorVerdict]:
    """Judges baselines, a decaying histogram and a learnt MLP on requests that none of them has
    seen."""
    cuts = cut_each(unseen, _HISTORY_CUTS_PER_TEXT, seed=seed)
    truth = truth_of(cuts, trace.layers)
    count_LE = load_of(seen)
    return [
        _learnt(seen, cuts, truth, seed, progress),
        *judged_history(count_LE, cuts, trace.layers),
        judge("decaying histogram", decaying(cuts, count_LE) * truth.top_k, truth),
    ]


def load_of(texts: RoutedTexts) -> NDArray[np.int64]:
    """Returns [L, E]: how often each expert was chosen."""
    num_layers = texts.expert_ids_TLK.shape[1]
    counts = [
        np.bincount(texts.expert_ids_TLK[:, layer].ravel(), minlength=texts.num_experts)
        for layer in range(num_layers)
    ]
    return np.array(counts, dtype=np.int64)


def decaying(
    cuts: PrefixCuts, count_LE: NDArray[np.integer], half_life: int = HALF_LIFE
) -> NDArray[np.float64]:
    """Returns [S, L, E]: a decaying histogram, as a server keeps it with one multiplication per
    token. It starts from the marginal, which counts a quarter of a half-life."""
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
) -> PredictorVerdict:
    recipe = replace(_HISTORY_RECIPE, seed=seed)
    mlp, _ = train_request(seen, history_shares, recipe, progress)
    with torch.inference_mode():
        shares = mlp(history_shares(cuts).float()).softmax(-1)
    return judge("MLP on the history", as_probability(shares, truth.top_k).numpy(), truth)


def truth_of_tokens(texts: RoutedTexts, layers: tuple[int, ...], columns: list[int]) -> Truth:
    """Makes every token a sample, with its own choice as the truth."""
    ids_NLK = texts.expert_ids_TLK[:, columns]
    request_N = np.repeat(np.arange(texts.num_requests), texts.lengths)
    return Truth(
        count_SLE=is_among(ids_NLK, texts.num_experts).astype(np.int8),
        num_tokens=1,
        top_k=ids_NLK.shape[2],
        document_S=texts.document[request_N],
        label_S=tuple(texts.label[request] for request in request_N),
        layers=layers,
    )


def judged_previous_token(
    texts: RoutedTexts, truth: Truth, columns: list[int], seen_count_LE: NDArray[np.integer]
) -> list[PredictorVerdict]:
    """Judges the marginal, and the last token's experts (ties and first tokens use the
    marginal)."""
    top_k, first_N = truth.top_k, np.zeros(len(truth.document_S), dtype=np.bool_)
    first_N[texts.starts[:-1]] = True
    total_L1 = seen_count_LE[columns].sum(-1, keepdims=True)
    marginal_LE = seen_count_LE[columns] / np.maximum(total_L1, 1) * top_k
    previous = np.roll(truth.count_SLE, 1, axis=0).astype(np.float32)
    previous[first_N] = 0
    everywhere = np.broadcast_to(marginal_LE, previous.shape)
    return [
        judge("marginal", everywhere, truth),
        judge("previous token", previous + 1e-3 * everywhere, truth, is_probability=False),
    ]
