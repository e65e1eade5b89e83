"""A request predictor that keeps learning from the real choices of requests.

Only a shift of the logits is learnt, one number per layer and expert. It follows a workload that
drifts away from the training texts, costs microseconds, and cannot make the MLP forget.

    shift += rate * (share that was observed - share that was predicted), averaged over requests

This is one step of gradient descent on the cross entropy of the shares. It is bounded by
`max_shift`, so that a burst of one kind of request cannot silence an expert.

R requests, L layers with routed experts, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routing_predictor.requests.request_mlp import RequestPredictor

_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineLimits:
    """Limits on how fast and how far it learns."""

    rate: float = 0.5  # for an observation of many requests; 1/16 of it for that of a single one
    max_shift: float = 2.0  # in units of a logit
    full_rate_requests: int = 16


class OnlinePredictor:
    """A `RequestPredictor` around another one. Not thread-safe; the engine owns it. It does not
    judge itself: its user measures its recall (`recall_guard.py`)."""

    def __init__(self, inner: RequestPredictor, top_k: int, limits: OnlineLimits) -> None:
        self._inner, self._top_k, self._limits = inner, top_k, limits
        self._shift_LE: NDArray[np.float32] | None = None
        self.num_observed = 0  # requests that it learnt from

    @property
    def horizon(self) -> int:
        return self._inner.horizon

    def predict(self, prefixes: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """Returns [R, L, E]: the inner predictor's result, shifted by the observations since."""
        probability_RLE = self._inner.predict(prefixes)
        if self._shift_LE is None:
            return probability_RLE
        weighed = np.maximum(probability_RLE, _SMALLEST) * np.exp(self._shift_LE)
        share = weighed / weighed.sum(-1, keepdims=True)
        shifted: NDArray[np.float32] = np.minimum(share * self._top_k, 1.0).astype(np.float32)
        return shifted

    def observe(self, predicted_RLE: NDArray[np.float32], count_RLE: NDArray[np.integer]) -> None:
        """Learns from the predictions for R requests, and from how often their next tokens chose
        each expert. Requests without a choice are left out."""
        seen = np.flatnonzero(count_RLE[:, 0].sum(-1))
        if not len(seen):
            return
        predicted_RLE, count_RLE = predicted_RLE[seen], count_RLE[seen].astype(np.float32)
        observed_RLE = count_RLE / count_RLE.sum(-1, keepdims=True)
        expected_RLE = predicted_RLE / predicted_RLE.sum(-1, keepdims=True)
        limits = self._limits
        rate = limits.rate * min(1.0, len(seen) / limits.full_rate_requests)
        step_LE = rate * (observed_RLE - expected_RLE).mean(0)
        shift_LE = step_LE if self._shift_LE is None else self._shift_LE + step_LE
        self._shift_LE = shift_LE.clip(-limits.max_shift, limits.max_shift).astype(np.float32)
        self.num_observed += len(seen)
