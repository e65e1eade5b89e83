"""A boosted forest as plain arrays: predicts the shares of bins without scikit-learn.

A walk goes down all trees at once, so a prediction of one row takes as many array operations as the
deepest tree has levels.

Shapes: T trees, N nodes of all trees, K classes (bins that were seen), F features, R rows.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_serve.engine.service.lengths.length_bins import NUM_BINS, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Nodes by number: a row goes to the first child if its feature is at most the threshold, else
    to the second. A leaf is its own child. No feature is missing (NaN). Trees come in rounds of one
    for each class."""

    roots_T: Ints
    feature_N: Ints
    threshold_N: Floats
    child_N2: Ints
    value_N: Floats
    baseline_K: Floats
    bins_K: Ints
    depth: int

    def shares(self, rows_RF: Floats) -> Floats:
        """Returns the shares of all bins [R, B]."""
        num_rows, num_trees = len(rows_RF), len(self.roots_T)
        at_M = np.tile(self.roots_T, num_rows)  # M = R * T: every row in every tree
        first_M = np.repeat(np.arange(num_rows) * rows_RF.shape[1], num_trees)
        values = rows_RF.ravel()
        for _ in range(self.depth):
            is_right_M = values.take(first_M + self.feature_N.take(at_M)) > self.threshold_N.take(
                at_M
            )
            at_M = self.child_N2.take(2 * at_M + is_right_M)
        num_classes = len(self.baseline_K)
        leaves = self.value_N.take(at_M).reshape(num_rows, -1, num_classes)
        raw_RK = self.baseline_K + leaves.sum(axis=1)
        raw_RK -= raw_RK.max(axis=1, keepdims=True)
        shares_RK = np.exp(raw_RK)
        shares_RB = np.zeros((num_rows, NUM_BINS))
        shares_RB[:, self.bins_K] = shares_RK / shares_RK.sum(axis=1, keepdims=True)
        return shares_RB

    def to_bytes(self) -> bytes:
        """Returns the arrays as an npz file."""
        file = io.BytesIO()
        names = [name for name in self.__slots__ if name != "depth"]
        np.savez(file, depth=np.int64(self.depth), **{n: getattr(self, n) for n in names})
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Forest:
        arrays: Mapping[str, np.ndarray]
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            given = {name: arrays[name] for name in arrays}
        depth = int(given.pop("depth"))
        return cls(**given, depth=depth)
