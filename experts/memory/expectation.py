"""Estimates which experts a layer's next visit needs, and how many visits away that visit is.

L layers (sparse ones, in the order of their visits), E experts, T rows, K choices per row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Hint = NDArray[np.floating]
_KEPT = 0.9  # share of a layer's history that is kept at each visit
_HINT = 0.5  # weight of a hint; the history has the rest
# smallest probability, so that an expert that was never seen is still expected at some time
_NEVER = 1e-3


class Expectation:
    """Probabilities P [L, E] that a layer's next visit needs an expert, from a decaying history or
    from predictions, whichever is newer.

    Layers are visited in a circle. An expert that a layer needs with probability p at its next
    visit, d visits away, and with probability q at each later visit, is expected in d + L (1 - p) /
    max(p, q) visits. The expert that is expected last is evicted first (if p = q and both are only
    0 or 1, this is Belady's rule). q combines history and hint; p equals q unless there is a
    prediction.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._history_LE: Scores = np.full((num_layers, num_experts), 0.5)
        self._usual_LE: Scores = self._history_LE.copy()
        self._expected_LE: Scores = self._history_LE.copy()
        self._hinted_LE: Hint | None = None
        # For each layer, by micro-batch: the probabilities predicted one layer earlier.
        self._foreseen: list[dict[int, Scores]] = [{} for _ in range(num_layers)]
        self._num_layers, self._now = num_layers, num_layers - 1

    def visit(self, layer: int, needed_E: NDArray[np.bool_]) -> None:
        """Record that a stage run of this layer has begun and needs these experts."""
        self._now = layer
        history_E = self._history_LE[layer]
        history_E *= _KEPT
        history_E[needed_E] += 1 - _KEPT
        self._expect(layer, None)

    def predict(self, layer: int, needed_E: Scores | None) -> None:
        """Set the prediction for the layer after this one, made from a visit of this layer. Ignored
        if another layer has been visited since."""
        if layer == self._now:
            self._expect((layer + 1) % self._num_layers, needed_E)

    def foresee(self, layer: int, micro_batch: int, following_E: Scores | None) -> Scores | None:
        """Record that a micro-batch has reached a layer and needs these experts of the next one.

        `following_E` is None without a prediction, and ignored after the last layer. Returns the
        prediction made earlier for this layer and micro-batch, if any.
        """
        # its effect on _expected_LE lasts until the visit
        came = self._foreseen[layer].pop(micro_batch, None)
        if following_E is not None and layer + 1 < self._num_layers:
            self._foreseen[layer + 1][micro_batch] = following_E
            self._expect(layer + 1, None)
        return came

    def hint(self, scores_LE: Hint | None) -> None:
        """Set the probability that the coming step needs each expert, known from its requests.

        A hint and the history count half each. It is kept until the next hint; None removes it.
        """
        shape = self._history_LE.shape
        assert scores_LE is None or scores_LE.shape == shape, (
            f"scores_LE must have the shape {shape}, got {scores_LE.shape}"
        )
        if scores_LE is None and self._hinted_LE is None and not any(self._foreseen):
            return
        self._hinted_LE = scores_LE
        for layer in range(self._num_layers):
            self._foreseen[layer].clear()  # left over from a step that failed
            self._expect(layer, None)

    @property
    def probability(self) -> Scores:
        """[L, E]: the probability that the layer's next visit needs an expert."""
        return self._expected_LE

    def distances(self) -> NDArray[np.int64]:
        """[L]: visits until each layer's next visit, 1 for the layer after the current one, L for
        the current one."""
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
