"""This machine's limits (memory read bandwidth and GEMM rates), and the best possible figures that
follow from them: bytes over bandwidth, and operations over peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from .model_size import ModelSize
from .work import Work

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time of one step, and the limit that sets it."""

    seconds: float
    limit: str  # "memory" or "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The best possible figures. A model that fits into the CPU's caches may exceed a memory
    limit.
    """

    ttft_s: float
    single_decode_tok_s: float
    batch_total_tok_s: float
    batch_decode_tok_s: float
    prefill_tok_s: float
    limited_by: dict[str, str]


def roofline(machine: MachineLimits, size: ModelSize, work: Work) -> Roofline:
    """Computes the limits; the number of touched experts is that of an even router."""
    first = _prefill(machine, size, 1, work.single_prompt)
    single = _decode(machine, size, 1, work.single_prompt + work.single_output / 2)
    batch = _decode(machine, size, work.batch_size, work.batch_prompt + work.batch_output / 2)
    batch_first = _prefill(machine, size, work.batch_size, work.batch_prompt)
    prefill = _prefill(machine, size, 1, work.prefill_prompt)
    batch_s = batch_first.seconds + (work.batch_output - 1) * batch.seconds
    return Roofline(
        ttft_s=first.seconds,
        single_decode_tok_s=1 / single.seconds,
        batch_total_tok_s=work.batch_size * work.batch_output / batch_s,
        batch_decode_tok_s=work.batch_size / batch.seconds,
        prefill_tok_s=work.prefill_prompt / prefill.seconds,
        limited_by={
            "ttft_s": first.limit,
            "single_decode_tok_s": single.limit,
            "batch_total_tok_s": batch.limit,
            "batch_decode_tok_s": batch.limit,
            "prefill_tok_s": prefill.limit,
        },
    )


def _decode(machine: MachineLimits, size: ModelSize, num_rows: int, context: float) -> Bound:
    num_kv = round(num_rows * context)
    num_bytes = size.step_bytes(num_rows, num_kv)
    return _bound(machine, size, num_bytes, size.step_flop(num_rows, num_rows, num_kv))


def _prefill(machine: MachineLimits, size: ModelSize, num_prompts: int, length: int) -> Bound:
    """Returns the bound of a prompt: a row attends to half of its length on average; one row has
    logits.
    """
    num_rows = num_prompts * length
    flop = size.step_flop(num_rows, num_prompts, num_rows * length / 2)
    return _bound(machine, size, size.step_bytes(num_rows, 0), flop)


def _bound(machine: MachineLimits, size: ModelSize, num_bytes: float, flop: float) -> Bound:
    memory_s = num_bytes / (machine.read_gb_s * 1e9)
    compute_s = flop / (machine.gemm_gflop_s(size.dtype) * 1e9)
    if memory_s >= compute_s:
        return Bound(seconds=memory_s, limit="memory")
    return Bound(seconds=compute_s, limit="compute")
