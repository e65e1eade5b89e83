"""The predictors between layers beside their baselines, token by token.

N tokens, L layers, K choices, E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routing_predictor.judge.evaluate import Truth, Verdict, judge
from routing_predictor.judge.scores import is_among
from routing_predictor.requests.texts import RoutedTexts


def truth_of_tokens(texts: RoutedTexts, layers: tuple[int, ...], columns: list[int]) -> Truth:
    """Every token is a sample; what happened is its own choice."""
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
) -> list[Verdict]:
    """The marginal, and the last token's experts (ties and first tokens: the marginal)."""
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
