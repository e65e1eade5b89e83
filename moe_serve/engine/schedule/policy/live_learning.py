"""Compares predictions for live requests with the experts they chose, so that a predictor can
learn.

A comparison begins with a prediction and ends with a later one of that request, or with the
request. Its cost is bounded by the tokens kept per comparison and the number of waiting
comparisons, and one comparison is learnt from between two steps.

N tokens, L layers, K choices, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.schedule.policy.concave_cost import Floats
from routing_predictor.requests.online import OnlinePredictor

_LEAST_TOKENS = 4  # least tokens of a comparison
_MOST_TOKENS = 64
_MOST_WAITING = 64  # comparisons; then the oldest are lost


@dataclass(slots=True)
class _Comparison:
    """A prediction, and the choices of the tokens that came after it."""

    predicted_LE: Floats
    parts: list[NDArray[np.integer]] = field(default_factory=list)
    num_tokens: int = 0

    def count(self) -> NDArray[np.int64]:
        """Returns [L, E]: how often each expert was chosen."""
        num_layers, num_experts = self.predicted_LE.shape
        ids_NLK = np.concatenate(self.parts).astype(np.int64)
        places = ids_NLK + np.arange(num_layers)[:, None] * num_experts
        counts = np.bincount(places.ravel(), minlength=self.predicted_LE.size)
        return counts.reshape(num_layers, num_experts)


class LiveLearning:
    """Comparisons by sequence id. Used on the engine's thread."""

    def __init__(self, predictor: OnlinePredictor) -> None:
        self._predictor = predictor
        self._open: dict[int, _Comparison] = {}
        self._ended: deque[_Comparison] = deque(maxlen=_MOST_WAITING)

    @property
    def num_learnt(self) -> int:
        """Number of comparisons learnt from so far."""
        return self._predictor.num_observed

    def predicted(self, key: int, predicted_LE: Floats) -> None:
        """Records a prediction for a request. One that follows the previous one too soon is not
        compared."""
        known = self._open.get(key)
        if known is None or known.num_tokens >= _LEAST_TOKENS:
            self.end([key])
            self._open[key] = _Comparison(predicted_LE)

    def chose(self, key: int, ids_NLK: NDArray[np.integer]) -> None:
        """Records the choices of tokens that came after the prediction."""
        comparison = self._open.get(key)
        if comparison is not None and comparison.num_tokens < _MOST_TOKENS:
            comparison.parts.append(ids_NLK.copy())  # copied, so that the step's array is freed
            comparison.num_tokens += len(ids_NLK)

    def end(self, keys: Iterable[int]) -> None:
        """Ends the comparisons of these sequences. Unknown ones are ignored."""
        for key in keys:
            comparison = self._open.pop(key, None)
            if comparison is not None and comparison.num_tokens >= _LEAST_TOKENS:
                self._ended.append(comparison)

    def learn(self) -> None:
        """Learns from the oldest comparison that has ended."""
        if self._ended:
            oldest = self._ended.popleft()
            self._predictor.observe(oldest.predicted_LE[None], oldest.count()[None])
