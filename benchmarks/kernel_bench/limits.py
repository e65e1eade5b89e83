"""Measures the device's limits: bytes copied, and operations of a large product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_bench.clock import Clock

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
