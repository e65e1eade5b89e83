"""The request predictor beside its baselines, on the same prefixes.

S samples, L layers, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routing_predictor.judge.baselines import blended, from_history, logistic_regression, marginal
from routing_predictor.judge.evaluate import Truth, Verdict, judge
from routing_predictor.requests.pools import PrefixPools
from routing_predictor.requests.prefix_samples import PrefixCuts, cut_each, cut_texts
from routing_predictor.requests.request_predictor import RequestPredictor
from routing_predictor.requests.texts import RoutedTexts
from routing_predictor.requests.train_request import pooled
from routing_predictor.traces.fitting import Progress

CUTS_PER_TEXT = 8
_CUTS_TO_FIT = 8_000  # of the logistic regression
_AT_ONCE = 256


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
) -> Verdict:
    prefixes = [prefix.astype(np.int64) for prefix in cuts.prefixes()]
    parts = [
        predictor.predict(prefixes[first : first + _AT_ONCE])
        for first in range(0, len(prefixes), _AT_ONCE)
    ]
    return judge("request predictor", np.concatenate(parts), truth_of(cuts, layers))


def judged_history(
    seen_count_LE: NDArray[np.integer], cuts: PrefixCuts, layers: tuple[int, ...]
) -> list[Verdict]:
    """The baselines that read choices only. `seen_count_LE`: of texts that may be learnt from."""
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
    """What the first half of the coming tokens chooses: how far the other half lets one come."""
    return np.stack([cuts.counts(end, end + cuts.horizon // 2) for end in cuts.end_S])


def judged_regression(
    seen: RoutedTexts,
    cuts: PrefixCuts,
    pools: PrefixPools,
    layers: tuple[int, ...],
    seed: int,
    progress: Progress,
) -> Verdict:
    """Logistic regression on the same pooled embeddings."""
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
