"""Switches predictions off while a simple baseline is better.

Predictions are always measured, even while they are off, so that they can be switched on again.
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)
_KEEP = 0.995  # weight of the past in the averages, at each answer
_LEAST = 50  # answers before the first decision, and between two
_MARGIN = 0.02  # share by which the loss must be lower to be used again


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
