"""Compares predicted lengths with the answers, to correct the predictions or to switch them off.

A predicted P90 should be exceeded by one answer in ten. If more exceed it, the corrected one is
taken at a higher level of the distribution (split conformal prediction on the newest answers, whose
level adapts: Gibbs and Candes, 2021). Predictions are always measured, even while they are off, so
that they can be switched on again.
"""

from __future__ import annotations

import logging
from collections import deque

import numpy as np

_LOG = logging.getLogger(__name__)
_NUM_RECENT = 1000
_EVERY = 10  # answers between two computations
_RATE = 0.005  # of the adaptation
_LEAST = 50  # answers before the first correction, the first decision, and between two decisions
_LOWEST, _HIGHEST = 0.01, 0.999
_KEEP = 0.995  # weight of the past in the guard's averages, at each answer
_MARGIN = 0.02  # share by which the loss must be lower to be used again


class Coverage:
    """The level at which a quantile is taken, so that a share `level` of answers is within it."""

    def __init__(self, level: float) -> None:
        self._level = self._aim = level
        self._taken = level  # where the distribution is read
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._is_within: deque[bool] = deque(maxlen=_NUM_RECENT)
        self._num_noted = 0

    @property
    def taken(self) -> float:
        """The level at which distributions must be read."""
        return self._taken

    @property
    def share(self) -> float | None:
        """The share of recent answers within their corrected quantile; None: no answer yet."""
        return sum(self._is_within) / len(self._is_within) if self._is_within else None

    def note(self, place: float, *, is_within: bool) -> None:
        """Adds an answer. `place` is the share of its predicted distribution that is shorter, and
        `is_within` says whether it was at most as long as the predicted, corrected quantile.
        """
        self._recent.append(place)
        self._is_within.append(is_within)
        self._aim += _RATE * (self._level - (1.0 if is_within else 0.0))
        self._aim = min(_HIGHEST, max(_LOWEST, self._aim))
        self._num_noted += 1
        if len(self._recent) >= _LEAST and self._num_noted % _EVERY == 0:
            found = float(np.quantile(np.array(self._recent), self._aim))
            self._taken = min(_HIGHEST, max(_LOWEST, found))


class LengthGuard:
    """Compares the losses of predictions and of the tenants' past answers."""

    def __init__(self) -> None:
        self.is_on = False  # off until the predictions are better than the baseline
        self.num_switches = 0
        self._own = self._baseline = 0.0
        self._weight = 0.0
        self._since = 0

    @property
    def losses(self) -> tuple[float, float] | None:
        """The mean losses of the predictions and of the baseline; None: no answer yet."""
        return (self._own / self._weight, self._baseline / self._weight) if self._weight else None

    def measure(self, own: float, baseline: float) -> None:
        """Adds the losses of an answer. Logs a line when it switches."""
        self._own = _KEEP * self._own + own
        self._baseline = _KEEP * self._baseline + baseline
        self._weight = _KEEP * self._weight + 1.0
        self._since += 1
        if self._since < _LEAST:
            return
        if self.is_on and self._own > self._baseline:
            self._switch(False)
        elif not self.is_on and self._own <= (1 - _MARGIN) * self._baseline:
            self._switch(True)

    def restart(self) -> None:
        """Forgets the losses: a new predictor is judged by its own answers."""
        self._own = self._baseline = self._weight = 0.0
        self._since = 0

    def _switch(self, is_on: bool) -> None:
        self.is_on, self._since = is_on, 0
        self.num_switches += 1
        own, baseline = self.losses or (0.0, 0.0)
        _LOG.warning(
            "the prediction of answer lengths is switched %s: its loss is %.3f, that of the "
            "tenants' past answers %.3f",
            "on" if is_on else "off", own, baseline,
        )  # fmt: skip
