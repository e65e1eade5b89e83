"""Which experts a layer's next visit will probably need, and how soon that visit comes.

L layers (sparse ones, in the order of their visits), E experts, T rows, K choices per row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
_KEPT = 0.9  # of a layer's history, at each visit
_NEVER = 1e-3  # the least probability: an expert that was never seen is expected some day


class Expectation:
    """P [L, E], from what is known last: a history with decay, or predictions.

    Layers are visited in a circle. An expert that a layer needs with probability p at each visit,
    the next of which is d visits away, is expected in d + L (1 - p) / p visits: what is expected
    last is evicted first (with p of 0 and 1 alone this is Belady's rule).
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._history_LE: Scores = np.full((num_layers, num_experts), 0.5)
        self._expected_LE: Scores = self._history_LE.copy()
        self._hinted_LE: Scores | None = None
        self._num_layers, self._now = num_layers, num_layers - 1

    def visit(self, layer: int, needed_E: NDArray[np.bool_]) -> None:
        """A stage run of this layer has begun, and this is what it needs."""
        self._now = layer
        history_E = self._history_LE[layer]
        history_E *= _KEPT
        history_E[needed_E] += 1 - _KEPT
        self._expect(layer, None)

    def predict(self, layer: int, needed_E: Scores | None) -> None:
        """By a visit of this layer, what the next one needs. Too late if that is here already."""
        if layer == self._now:
            self._expect((layer + 1) % self._num_layers, needed_E)

    def hint(self, scores_LE: Scores | None) -> None:
        """Somebody knows the coming step: the probability that it needs each expert. Held until
        the next hint; None: until history knows better."""
        shape = self._history_LE.shape
        assert scores_LE is None or scores_LE.shape == shape, f"a hint is {shape}"
        self._hinted_LE = scores_LE
        for layer in range(self._num_layers):
            self._expect(layer, None)

    @property
    def probability(self) -> Scores:
        """[L, E]: that the layer's next visit needs an expert."""
        return self._expected_LE

    def distances(self) -> NDArray[np.int64]:
        """[L]: visits until each layer's next, 1 for the layer after this one, L for this one."""
        return (np.arange(self._num_layers) - self._now - 1) % self._num_layers + 1

    def visits_until(self) -> Scores:
        """[L, E]: the expected number of visits until an expert is needed."""
        p_LE = np.maximum(self._expected_LE, _NEVER)
        until_LE: Scores = self.distances()[:, None] + self._num_layers * (1 - p_LE) / p_LE
        return until_LE

    def _expect(self, layer: int, predicted_E: Scores | None) -> None:
        if predicted_E is None and self._hinted_LE is not None:
            predicted_E = self._hinted_LE[layer]
        known_E = self._history_LE[layer]
        self._expected_LE[layer] = known_E if predicted_E is None else predicted_E
