"""Whether a predictor is still worth following: its measured recall against a floor."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

_ENOUGH = 256  # tokens before a first verdict
_MEMORY = 2048.0  # tokens over which recall is averaged
_RETURN = 1.05  # times the floor, before it is followed again


class RecallFloor:
    """Fed with what came true; says on and off, and logs each change."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._hits = self._weight = 0.0
        self._num_tokens = 0
        self.is_on = True

    @property
    def recall(self) -> float | None:
        """None until something was measured."""
        return self._hits / self._weight if self._weight else None

    def observe(self, share: float, num_tokens: int) -> None:
        """Of the experts that so many tokens chose, this share had been predicted."""
        kept = max(0.0, 1.0 - num_tokens / _MEMORY)
        self._hits = self._hits * kept + share * num_tokens
        self._weight = self._weight * kept + num_tokens
        self._num_tokens += num_tokens
        if self._num_tokens >= _ENOUGH:
            self._judge(self._hits / self._weight)

    def _judge(self, recall: float) -> None:
        if self.is_on and recall < self._floor:
            self.is_on = False
            _log.warning(
                "the request predictor is off: its recall is %.3f, below predictor.min_recall "
                "(%.3f); batches are fifo",
                recall,
                self._floor,
            )
        elif not self.is_on and recall >= min(1.0, self._floor * _RETURN):
            self.is_on = True
            _log.info("the request predictor is on again: its recall is %.3f", recall)
