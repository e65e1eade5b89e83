"""Measures this machine's limits: memory read bandwidth and GEMM rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

_READ_BYTES = 512 * 2**20  # far more than any cache
_GEMM_SIZE = 1536
_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """The best rates of some rounds, with `num_threads` threads."""

    num_threads: int
    read_gb_s: float  # 1e9 bytes per second
    gemm_bf16_gflop_s: float
    gemm_fp32_gflop_s: float
    busy_cores: float = 0.0  # that others used just before: above a few tenths, measure again

    def gemm_gflop_s(self, dtype: str) -> float:
        """Returns the rate for weights of `dtype`; half precision may compute in fp32 if that is
        faster.
        """
        half = max(self.gemm_bf16_gflop_s, self.gemm_fp32_gflop_s)
        return self.gemm_fp32_gflop_s if dtype == "float32" else half


def measure_limits(num_threads: int) -> MachineLimits:
    """Measures the limits in about ten seconds; other programs should not run meanwhile."""
    torch.set_num_threads(num_threads)
    return MachineLimits(
        num_threads=num_threads,
        busy_cores=psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1),
        read_gb_s=_read_bandwidth(),
        gemm_bf16_gflop_s=_gemm_rate(torch.bfloat16),
        gemm_fp32_gflop_s=_gemm_rate(torch.float32),
    )


def _read_bandwidth() -> float:
    """Returns the better of a sum and a matrix-vector product over the same buffer."""
    width = 4096
    matrix = torch.ones(_READ_BYTES // 4 // width, width)
    vector = torch.ones(width)
    seconds = min(_best_time(matrix.sum), _best_time(lambda: torch.mv(matrix, vector)))
    return _READ_BYTES / seconds / 1e9


def _gemm_rate(dtype: torch.dtype) -> float:
    a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE).to(dtype) for _ in range(2))
    return 2 * _GEMM_SIZE**3 / _best_time(lambda: torch.mm(a, b)) / 1e9


def _best_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
