"""Times work on a device (the median of many runs, with the caches flushed before each), and
measures the device's limits: bytes copied, and operations of a large product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[], object]
_WARM_UPS = 3
_CPU_FLUSH_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The median and the fastest of `num_runs` runs.

    `mode` is "graph" for a replayed CUDA graph, else "eager": on a GPU the time then includes the
    host's launches.
    """

    seconds: float
    fastest: float
    num_runs: int
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """At least `min_runs` runs, then more until `seconds` are used or `max_runs` are done."""

    min_runs: int = 10
    max_runs: int = 200
    seconds: float = 1.0


class Clock:
    """Measures work on one device. With `flush_bytes` 0 the caches stay as the last run left
    them.
    """

    def __init__(
        self, device: torch.device, budget: Budget, flush_bytes: int | None = None
    ) -> None:
        self.device = device
        self._budget = budget
        size = _flush_size(device) if flush_bytes is None else flush_bytes
        self._flushed = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def measure(self, work: Work, is_capturable: bool = True) -> Timing:
        """Measures work; with `is_capturable` it never waits for the device, so that a graph can
        replay it.
        """
        for _ in range(_WARM_UPS):
            work()
        if self.device.type != "cuda":
            return self._run(self._time_on_host, work, "eager")
        torch.cuda.synchronize(self.device)
        if is_capturable:
            return self._run(self._time_on_device, _captured(work).replay, "graph")
        return self._run(self._time_on_device, work, "eager")

    def _run(self, time_once: Callable[[Work], float], work: Work, mode: str) -> Timing:
        times: list[float] = []
        budget, started = self._budget, time.perf_counter()
        while len(times) < budget.max_runs and (
            len(times) < budget.min_runs or time.perf_counter() - started < budget.seconds
        ):
            times.append(time_once(work))
        return Timing(
            seconds=statistics.median(times), fastest=min(times), num_runs=len(times), mode=mode
        )

    def _time_on_host(self, work: Work) -> float:
        self._flush()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _time_on_device(self, work: Work) -> float:
        """Times work between two events; the flush keeps the device busy while the host queues
        the work.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _flush(self) -> None:
        self._flushed.add_(1)


def _flush_size(device: torch.device) -> int:
    """Returns four times the size of the last cache, so that a flush leaves little of its
    content.
    """
    if device.type != "cuda":
        return _CPU_FLUSH_BYTES
    return 4 * int(torch.cuda.get_device_properties(device).L2_cache_size)


def _captured(work: Work) -> torch.cuda.CUDAGraph:
    """Captures the work as a graph, after a warm-up on a side stream, which capturing requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The amounts of data and operations with which the limits are measured."""

    copy_bytes: int
    matrix: int


CUDA_SIZES = Sizes(copy_bytes=2048 * _MIB, matrix=8192)
CPU_SIZES = Sizes(copy_bytes=256 * _MIB, matrix=1536)
SMOKE_SIZES = Sizes(copy_bytes=_MIB, matrix=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """`copy_gb_s` counts bytes read and bytes written; 1e9 bytes, 1e9 operations."""

    copy_gb_s: float
    matrix_gflop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time of a piece of work, and the limit that sets it."""

    seconds: float
    set_by: str  # "memory" or "compute"


def measure_limits(clock: Clock, dtype: torch.dtype, sizes: Sizes) -> DeviceLimits:
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=clock.device)
    goal = torch.empty_like(source)
    copy_s = clock.measure(lambda: goal.copy_(source)).seconds
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=clock.device).to(dtype) for _ in "ab")
    matrix_s = clock.measure(lambda: torch.mm(a, b)).seconds
    return DeviceLimits(
        copy_gb_s=2 * sizes.copy_bytes / copy_s / 1e9,
        matrix_gflop_s=2 * sizes.matrix**3 / matrix_s / 1e9,
    )


def bound(limits: DeviceLimits, num_bytes: float, num_operations: float) -> Bound:
    """Returns bytes over bandwidth or operations over the matrix rate, whichever takes longer."""
    memory_s = num_bytes / (limits.copy_gb_s * 1e9)
    compute_s = num_operations / (limits.matrix_gflop_s * 1e9)
    if memory_s >= compute_s:
        return Bound(seconds=memory_s, set_by="memory")
    return Bound(seconds=compute_s, set_by="compute")
