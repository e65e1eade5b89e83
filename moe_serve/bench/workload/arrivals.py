"""When requests are due in an open loop: gaps that do not depend on the server's answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Draws arrivals at `rate` requests per second, with gamma-distributed gaps.

    `burstiness` is the square of the coefficient of variation of the gaps, 1 / shape: 1 is Poisson,
    larger values give bursts, smaller ones are more even, and 0 is a metronome.
    """

    rate: float
    burstiness: float = 1.0

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        """Yields seconds since the start; the first request is due after the first gap."""
        at = 0.0
        mean = 1.0 / self.rate
        while True:
            if self.burstiness == 0:
                at += mean
            else:
                at += float(rng.gamma(1.0 / self.burstiness, mean * self.burstiness))
            yield at
