"""What a predictor must beat.

S samples, L layers, E experts, F features. Each gives scores [S, L, E] that sum to 1 in a layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routing_predictor.judge.scores import share

Floats = NDArray[np.floating]

_NUM_DRAWS, _MAX_ITERATIONS = 4, 40  # of the regression
_INVERSE_PENALTY = 1e-4  # the best of 1e-2, ..., 1e-5 on the demonstration model
HISTORY_WEIGHT = 64.0  # choices of history that count as much as the marginal, in `blended`


def marginal(count_LE: NDArray[Any], num_samples: int) -> Floats:
    """How often each expert is chosen at all, of every layer."""
    frequency_LE = share(count_LE, count_LE.sum(-1, keepdims=True))
    repeated: Floats = np.broadcast_to(frequency_LE, (num_samples, *frequency_LE.shape))
    return repeated


def from_history(history_SLE: NDArray[Any]) -> Floats:
    """What the prefix's own tokens chose."""
    return share(history_SLE, history_SLE.sum(-1, keepdims=True))


def blended(history_SLE: NDArray[Any], count_LE: NDArray[Any]) -> Floats:
    """History with the marginal as its prior: a short prefix says little."""
    prior_LE = share(count_LE, count_LE.sum(-1, keepdims=True)) * HISTORY_WEIGHT
    return from_history(history_SLE + prior_LE[None])


def logistic_regression(
    features_SF: Floats,
    count_SLE: NDArray[Any],
    unseen_UF: Floats,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _what, _share: None,
) -> Floats:
    """[U, L, E]: one multinomial regression per layer on the pooled embedding (scikit-learn), of
    single choices: sample s is of class e as often as expert e was used after it. To keep that
    bounded, four choices are drawn of each sample."""
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
        if chosen.min() == chosen.max():  # a regression needs two
            scores[:, layer, chosen.min()] = 1.0
            continue
        model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=_MAX_ITERATIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # what 40 steps give is taken
            model.fit(np.tile(seen_SF, (_NUM_DRAWS, 1)), chosen.reshape(-1))
        scores[:, layer, model.classes_] = model.predict_proba(unseen)
    return scores
