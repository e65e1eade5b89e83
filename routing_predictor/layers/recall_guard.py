"""Measures how good predictions are, and switches their use off and on.

Below the floor the predictor is off and its predictions have no effect. It is still asked and
measured, so that it can be switched on when it has learnt. That happens a little above the floor,
so that the switch does not flicker.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """The recall at which a predictor is switched off and on."""

    min_recall: float
    hysteresis: float = 0.03  # recall above the floor at which it comes back
    window: int = 200  # approximate number of measurements in the average
    min_measured: int = 50  # measurements before the first decision, and between two


class RecallGuard:
    """An exponential average of measured recall, with a switch that depends on it."""

    def __init__(self, limits: GuardLimits, name: str = "the request predictor") -> None:
        self._limits, self._name = limits, name
        self._recall: float | None = None
        self._since_switch = 0
        self.is_on = True
        self.num_switches = 0

    @property
    def recall(self) -> float | None:
        """The recent recall; None before the first measurement."""
        return self._recall

    def measure(self, recall: float, count: int = 1) -> None:
        """Adds the mean recall of `count` predictions. Logs a line when it switches."""
        if count <= 0:
            return
        keep = (1 - 1 / self._limits.window) ** count
        previous = recall if self._recall is None else self._recall
        self._recall = keep * previous + (1 - keep) * recall
        self._since_switch += count
        if self._since_switch < self._limits.min_measured:
            return
        floor = self._limits.min_recall
        if self.is_on and self._recall < floor:
            self._switch(False, f"its recall is {self._recall:.1%}, below {floor:.1%}")
        elif not self.is_on and self._recall >= floor + self._limits.hysteresis:
            self._switch(True, f"its recall is {self._recall:.1%} again")

    def _switch(self, is_on: bool, why: str) -> None:
        self.is_on, self._since_switch = is_on, 0
        self.num_switches += 1
        _LOG.warning("%s is switched %s: %s", self._name, "on" if is_on else "off", why)
