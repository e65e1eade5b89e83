"""Medians of repeated calls: the one clock of the calibration."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Times calls on a device. A call is repeated for `seconds`, and between 3 and 200 times."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds

    def median(self, call: Callable[[], object]) -> float:
        """Seconds of a call, after one that is not counted."""
        self._time(call)
        times: list[float] = []
        while len(times) < 3 or (sum(times) < self._seconds and len(times) < 200):
            times.append(self._time(call))
        return statistics.median(times)

    def _time(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
