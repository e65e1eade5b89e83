"""The interface of a predictor of whole requests, as batching uses it.

R requests, L layers with routed experts, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RequestPredictor(Protocol):
    """Predicts the experts of a request's coming tokens from its tokens so far."""

    @property
    def horizon(self) -> int:
        """Number of coming tokens that a prediction covers."""
        ...

    def predict(self, prefixes: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """[R, L, E]: the probability that a coming token chooses the expert. The sum is about k per
        layer. Predictions never affect the router's choices."""
        ...
