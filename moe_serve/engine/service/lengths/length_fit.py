"""Fits a forest to past answers, in a process of its own.

python -m moe_serve.engine.service.lengths.length_fit

The process reads one npz file of rows from standard input and writes the forest's to standard
output. Only it imports scikit-learn, and it gives way to processes that compute steps.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moe_serve.child_python import module_command
from moe_serve.engine.service.lengths.forest import Forest
from moe_serve.engine.service.lengths.length_bins import NUM_BINS, Floats, Ints

_LOG = logging.getLogger(__name__)
_MODULE = "moe_serve.engine.service.lengths.length_fit"
_NICE = 15
_ROUNDS, _LEAVES, _LEAST_LEAF, _RATE, _L2 = 40, 8, 20, 0.06, 5.0
_TINY = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Rows of features with the bin that each ended in, and how much it counts."""

    rows_RF: Floats
    bins_R: Ints
    weights_R: Floats

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(file, rows=self.rows_RF, bins=self.bins_R, weights=self.weights_R)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> TrainingRows:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return cls(rows_RF=arrays["rows"], bins_R=arrays["bins"], weights_R=arrays["weights"])


MakeRows = Callable[[], TrainingRows]


class Fitter(Protocol):
    """Fits in the background: at most one fit at a time."""

    def start(self, make_rows: MakeRows) -> None:
        """Begins a fit. Returns at once."""
        ...

    @property
    def is_busy(self) -> bool: ...

    def take(self) -> Forest | None:
        """Returns the forest of a fit that has ended since the last call, if any."""
        ...

    def close(self) -> None: ...


def fit(rows: TrainingRows) -> Forest:
    """Fits a forest in this process. Raises ImportError without scikit-learn.

    Every bin has a row of tiny weight, so that the forest has all of them.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    mean_F = np.average(rows.rows_RF, axis=0, weights=rows.weights_R)
    rows_RF = np.concatenate([rows.rows_RF, np.tile(mean_F, (NUM_BINS, 1))])
    bins_R = np.concatenate([rows.bins_R, np.arange(NUM_BINS)])
    weights_R = np.concatenate([rows.weights_R, np.full(NUM_BINS, _TINY)])
    model = HistGradientBoostingClassifier(
        max_iter=_ROUNDS,
        learning_rate=_RATE,
        max_leaf_nodes=_LEAVES,
        min_samples_leaf=_LEAST_LEAF,
        l2_regularization=_L2,
        early_stopping=False,
        random_state=0,
    )
    model.fit(rows_RF, bins_R, sample_weight=weights_R)
    return _exported(model)


def _exported(model: Any) -> Forest:
    """Copies the trees of a fitted classifier into arrays."""
    parts = [tree.nodes for round_trees in model._predictors for tree in round_trees]
    sizes = [len(part) for part in parts]
    roots_T = np.cumsum([0, *sizes[:-1]])
    offsets_N = np.repeat(roots_T, sizes)
    nodes = np.concatenate(parts)
    is_leaf_N, own_N = nodes["is_leaf"].astype(bool), np.arange(len(nodes))
    children = [nodes[side].astype(np.int64) + offsets_N for side in ("left", "right")]
    return Forest(
        roots_T=roots_T,
        feature_N=np.where(is_leaf_N, 0, nodes["feature_idx"]).astype(np.int64),
        threshold_N=np.where(is_leaf_N, 0.0, nodes["num_threshold"]),
        child_N2=np.stack([np.where(is_leaf_N, own_N, each) for each in children], axis=1),
        value_N=np.where(is_leaf_N, nodes["value"], 0.0),
        baseline_K=np.asarray(model._baseline_prediction, dtype=np.float64).ravel(),
        bins_K=np.asarray(model.classes_, dtype=np.int64),
        depth=int(nodes["depth"].max()),
    )


class ProcessFitter:
    """Implements Fitter by a process for each fit, and a thread that waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forest: Forest | None = None
        self._is_closed = False

    def start(self, make_rows: MakeRows) -> None:
        """See `Fitter.start`."""
        assert not self.is_busy, "one fit at a time"
        self._thread = threading.Thread(target=self._run, args=(make_rows,), daemon=True)
        self._thread.start()

    def _run(self, make_rows: MakeRows) -> None:
        content = make_rows().to_bytes()
        with subprocess.Popen(
            module_command(_MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            self._process = process
            if self._is_closed:
                process.kill()
            output, _ = process.communicate(content)
        self._process = None
        if process.returncode == 0:
            self._forest = Forest.from_bytes(output)
        elif not self._is_closed:
            _LOG.warning("the fit of answer lengths ended with code %d", process.returncode)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def take(self) -> Forest | None:
        """See `Fitter.take`. A fit that failed gives nothing."""
        forest, self._forest = self._forest, None
        return forest

    def close(self) -> None:
        """Ends a fit that runs."""
        self._is_closed = True
        process, thread = self._process, self._thread
        if process is not None:
            process.kill()
        if thread is not None:
            thread.join()


class HereFitter:
    """Implements Fitter by fitting at once. For tests and offline evaluation."""

    is_busy = False

    def __init__(self) -> None:
        self._forest: Forest | None = None

    def start(self, make_rows: MakeRows) -> None:
        self._forest = fit(make_rows())

    def take(self) -> Forest | None:
        forest, self._forest = self._forest, None
        return forest

    def close(self) -> None:
        """Does nothing, as no fit runs."""


def main() -> None:
    os.nice(_NICE)
    rows = TrainingRows.from_bytes(sys.stdin.buffer.read())
    sys.stdout.buffer.write(fit(rows).to_bytes())


if __name__ == "__main__":
    main()
