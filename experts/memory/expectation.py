"""Estimates which experts a layer's next visit needs, from past visits and from the choices of
rows in the layer before.

L layers (sparse ones, in the order of their visits), E experts, T rows, K choices per row. The
first layer follows the last one, but there it belongs to the next token, which in a decode step
comes from other rows; nothing is learnt for that pair.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        """Records that a stage run of this layer has begun and needs these experts."""
        self._now = layer
        history_E = self._history_LE[layer]
        history_E *= _KEPT
        history_E[needed_E] += 1 - _KEPT
        self._expect(layer, None)

    def predict(self, layer: int, needed_E: Scores | None) -> None:
        """Sets the prediction for the layer after this one, made from a visit of this layer.
        Ignored if another layer has been visited since."""
        if layer == self._now:
            self._expect((layer + 1) % self._num_layers, needed_E)

    def foresee(self, layer: int, micro_batch: int, following_E: Scores | None) -> Scores | None:
        """Records that a micro-batch has reached a layer and needs these experts of the next one.

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
        """Sets the probability that the coming step needs each expert, known from its requests.

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
        """Returns [L]: visits until each layer's next visit, 1 for the layer after the current one,
        L for the current one."""
        return (np.arange(self._num_layers) - self._now - 1) % self._num_layers + 1

    def visits_until(self) -> Scores:
        """Returns [L, E]: the expected number of visits until an expert is needed."""
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


_MAX_ROWS = 64  # rows of a visit that are used
_MAX_COUNT = 4096.0  # rows counted for an expert, above which all of its counts are halved
_LEAST_ROWS = 64.0  # rows a layer needs before it predicts
_REFRESH = 16  # visits of a layer between two computations of its log odds
# The experts of one row are not statistically independent, so the log odds that each adds are
# scaled by this factor. Of 0.4 to 1, 0.6 had the smallest log loss on the demonstration model
# (docs/internals/expert-memory.md).
_TRUST = 0.6


class Transitions:
    """Counts [L, E, E] of the choices of rows in consecutive layers.

    Rows are matched by position: a visit of a layer is assumed to have the same rows, in the same
    order, as the visit of the layer before. If the numbers of rows differ, nothing is learnt. The
    id -1 stands for no expert.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts_LEE = np.zeros((num_layers, num_experts, num_experts), dtype=np.float32)
        self._rows_LE = np.zeros((num_layers, num_experts), dtype=np.float32)
        self._odds: list[_Odds | None] = [None] * num_layers
        self._age_L = np.full(num_layers, _REFRESH)  # visits since the odds were computed
        self._last: tuple[int, NDArray[np.int64]] | None = None

    def visit(self, layer: int, expert_ids_TK: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Learns from a visit; returns the probability [E] that the next layer needs each expert,
        or None while there are too few counts."""
        ids_TK = expert_ids_TK[:_MAX_ROWS]
        last, self._last = self._last, (layer, ids_TK)
        if last is not None and last[0] == layer - 1 and last[1].shape == ids_TK.shape:
            self._learn(last[0], last[1], ids_TK)
        self._age_L[layer] += 1
        if self._age_L[layer] > _REFRESH:
            self._age_L[layer] = 0
            self._odds[layer] = self._log_odds(layer, ids_TK.shape[1])
        odds = self._odds[layer]
        return None if odds is None else odds.needed(_chosen(ids_TK, self._rows_LE.shape[1]))

    def _learn(
        self, layer: int, ids_TK: NDArray[np.int64], following_TK: NDArray[np.int64]
    ) -> None:
        num_experts = self._rows_LE.shape[1]
        here_TE = _chosen(ids_TK, num_experts)
        self._counts_LEE[layer] += here_TE.T @ _chosen(following_TK, num_experts)
        self._rows_LE[layer] += here_TE.sum(axis=0)
        full_E = self._rows_LE[layer] > _MAX_COUNT
        if full_E.any():
            self._rows_LE[layer, full_E] /= 2
            self._counts_LEE[layer, full_E] /= 2

    def _log_odds(self, layer: int, top_k: int) -> _Odds | None:
        rows_E, counts_EE = self._rows_LE[layer], self._counts_LEE[layer]
        if rows_E.sum() < _LEAST_ROWS * top_k:
            return None
        alone_E = counts_EE.sum(axis=0) / rows_E.sum()
        # Add one average row to each expert, so that unseen experts have no influence.
        after_EE = (counts_EE + alone_E) / (rows_E[:, None] + 1)
        base_E = _logit(alone_E)
        return _Odds(base_E, _TRUST * (_logit(after_EE) - base_E))


@dataclass(frozen=True, slots=True)
class _Odds:
    """The log odds [E] that a row chooses an expert, and the amount each expert chosen in the layer
    before adds."""

    base_E: NDArray[np.float32]
    added_EE: NDArray[np.float32]

    def needed(self, here_TE: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns [E]: the probability that at least one of the rows chooses an expert."""
        odds_TE = (self.base_E + here_TE @ self.added_EE).astype(np.float64)
        needed_E: NDArray[np.float64] = 1.0 - np.prod(1.0 / (1.0 + np.exp(odds_TE)), axis=0)
        return needed_E


def _logit(p: NDArray[np.float32]) -> NDArray[np.float32]:
    p = np.clip(p, 1e-3, 1 - 1e-3)
    logits: NDArray[np.float32] = np.log(p / (1 - p))
    return logits


def _chosen(ids_TK: NDArray[np.int64], num_experts: int) -> NDArray[np.float32]:
    """Returns [T, E]: 1 where a row chose an expert."""
    chosen = np.zeros((len(ids_TK), num_experts + 1), dtype=np.float32)
    chosen[np.arange(len(ids_TK))[:, None], ids_TK] = 1.0  # id -1 indexes the last column
    return chosen[:, :num_experts]
