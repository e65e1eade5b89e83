"""The one clock of the calibration.

Other programs can only make a call slower, so the median of the faster half counts: on a quiet
machine it is near the median, on a busy one it is what the machine can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_LONG_S = 1.0


def usual(times: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(times)[(len(times) - 1) // 4]


class Stopwatch:
    """Times calls on a device, each for `budget_s` seconds and 3 to 200 times; long ones once."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self._device, self._budget_s = device, budget_s

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call, after one that is not counted."""
        self._time(call)
        times: list[float] = []
        while not times or (len(times) < 3 and sum(times) < _LONG_S) or self._has_time(times):
            times.append(self._time(call))
        return usual(times)

    def _has_time(self, times: Sequence[float]) -> bool:
        return sum(times) < self._budget_s and len(times) < 200

    def _time(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
