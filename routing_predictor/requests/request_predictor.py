"""What batching asks of a predictor of whole requests.

R requests, L layers with routed experts, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RequestPredictor(Protocol):
    """From the tokens that a request has so far to the experts of those that come."""

    @property
    def horizon(self) -> int:
        """Coming tokens that a prediction is about."""
        ...

    def predict(self, prefixes: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """[R, L, E]: the probability that a coming token chooses the expert. Sums to k per layer,
        roughly. Never affects what the router chooses."""
        ...
