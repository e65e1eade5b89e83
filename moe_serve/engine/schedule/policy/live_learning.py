"""What was predicted of live requests beside what they chose: what a predictor goes on learning by.

A comparison begins with a prediction and ends with a later one of that request, or with the
request. Its cost is bounded: so many tokens of a comparison are kept, so many comparisons wait, and
one is learnt from between two steps.

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

_LEAST_TOKENS = 4  # of a comparison: fewer say nothing
_MOST_TOKENS = 64
_MOST_WAITING = 64  # comparisons; then the oldest are lost


@dataclass(slots=True)
class _Comparison:
    """A prediction, and the choices of the tokens that came after it."""

    predicted_LE: Floats
    parts: list[NDArray[np.integer]] = field(default_factory=list)
    num_tokens: int = 0

    def count(self) -> NDArray[np.int64]:
        """[L, E]: how often each expert was chosen."""
        num_layers, num_experts = self.predicted_LE.shape
        ids_NLK = np.concatenate(self.parts).astype(np.int64)
        places = ids_NLK + np.arange(num_layers)[:, None] * num_experts
        counts = np.bincount(places.ravel(), minlength=self.predicted_LE.size)
        return counts.reshape(num_layers, num_experts)


class LiveLearning:
    """By sequence id. On the engine's thread."""

    def __init__(self, predictor: OnlinePredictor) -> None:
        self._predictor = predictor
        self._open: dict[int, _Comparison] = {}
        self._ended: deque[_Comparison] = deque(maxlen=_MOST_WAITING)

    @property
    def num_learnt(self) -> int:
        """Comparisons so far."""
        return self._predictor.num_observed

    def predicted(self, key: int, predicted_LE: Floats) -> None:
        """A request was predicted, for the first time or again; too early a second prediction is
        not compared."""
        known = self._open.get(key)
        if known is None or known.num_tokens >= _LEAST_TOKENS:
            self.end([key])
            self._open[key] = _Comparison(predicted_LE)

    def chose(self, key: int, ids_NLK: NDArray[np.integer]) -> None:
        """Choices of tokens that came after its prediction."""
        comparison = self._open.get(key)
        if comparison is not None and comparison.num_tokens < _MOST_TOKENS:
            comparison.parts.append(ids_NLK.copy())  # of a few tokens; the step's array goes
            comparison.num_tokens += len(ids_NLK)

    def end(self, keys: Iterable[int]) -> None:
        """What they choose from now on is compared with nothing; unknown ones are ignored."""
        for key in keys:
            comparison = self._open.pop(key, None)
            if comparison is not None and comparison.num_tokens >= _LEAST_TOKENS:
                self._ended.append(comparison)

    def learn(self) -> None:
        """From the oldest of the comparisons that have ended."""
        if self._ended:
            oldest = self._ended.popleft()
            self._predictor.observe(oldest.predicted_LE[None], oldest.count()[None])
