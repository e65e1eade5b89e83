"""Which experts a layer's next visit will probably need, and how soon that visit comes.

L layers (sparse ones, in the order of their visits), E experts, T rows, K choices per row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Hint = NDArray[np.floating]
_KEPT = 0.9  # of a layer's history, at each visit
_HINT = 0.5  # what a hint counts, beside the history
_NEVER = 1e-3  # the least probability: an expert that was never seen is expected some day


class Expectation:
    """P [L, E], from what is known last: a history with decay, or predictions.

    Layers are visited in a circle. An expert that a layer needs with probability p at its next
    visit, d visits away, and with probability q at those after it, is expected in
    d + L (1 - p) / max(p, q) visits: what is expected last is evicted first (with p = q of 0 and 1
    alone this is Belady's rule). q is history and hint; p is q as long as nobody predicts better.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._history_LE: Scores = np.full((num_layers, num_experts), 0.5)
        self._usual_LE: Scores = self._history_LE.copy()
        self._expected_LE: Scores = self._history_LE.copy()
        self._hinted_LE: Hint | None = None
        # What micro-batches that are a layer before it will need of each layer.
        self._foreseen: list[dict[int, Scores]] = [{} for _ in range(num_layers)]
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

    def foresee(self, layer: int, micro_batch: int, following_E: Scores | None) -> Scores | None:
        """A micro-batch has come to a layer, and needs this of the next one; None: nobody knows, or
        there is none -> what had been foreseen of it here."""
        came = self._foreseen[layer].pop(micro_batch, None)  # and it counts until the visit
        if following_E is not None and layer + 1 < self._num_layers:
            self._foreseen[layer + 1][micro_batch] = following_E
            self._expect(layer + 1, None)
        return came

    def hint(self, scores_LE: Hint | None) -> None:
        """A step begins, and somebody knows it: the probability that it needs each expert, which
        counts half beside the history. Held until the next hint; None: nobody knows."""
        shape = self._history_LE.shape
        assert scores_LE is None or scores_LE.shape == shape, f"a hint is {shape}"
        if scores_LE is None and self._hinted_LE is None and not any(self._foreseen):
            return
        self._hinted_LE = scores_LE
        for layer in range(self._num_layers):
            self._foreseen[layer].clear()  # of a step that failed on its way
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
        rounds_LE = (1 - p_LE) / np.maximum(p_LE, self._usual_LE)
        until_LE: Scores = self.distances()[:, None] + self._num_layers * rounds_LE
        return until_LE

    def _expect(self, layer: int, predicted_E: Scores | None) -> None:
        usual_E = self._history_LE[layer]
        if self._hinted_LE is not None:
            usual_E = _HINT * self._hinted_LE[layer] + (1 - _HINT) * usual_E
        if predicted_E is None and self._foreseen[layer]:
            predicted_E = 1 - np.prod([1 - p_E for p_E in self._foreseen[layer].values()], axis=0)
        self._usual_LE[layer] = usual_E
        self._expected_LE[layer] = usual_E if predicted_E is None else predicted_E
