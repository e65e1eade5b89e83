"""Which set of kernels serves a device and dtype: the one place where this is decided."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from moe_kernels.cpu_library import load_cpu_library
from moe_kernels.kernels import Kernels
from moe_kernels.linear import packing_refusal
from moe_kernels.native_kernels import NativeKernels
from moe_kernels.torch_kernels import TorchKernels

KernelsName = Literal["auto", "native", "torch"]


@functools.lru_cache(maxsize=1)
def default_num_threads() -> int:
    """Torch's number of threads when first asked: OMP_NUM_THREADS, or the machine's cores."""
    return torch.get_num_threads()


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    name: KernelsName = "auto",
    num_threads: int | None = None,
) -> Kernels:
    """`auto`: native on a CPU where it can be built, else torch. The set's name says why.

    Kernels with threads of their own want torch to have one: its workers spin for a while after
    each use, on the cores that the kernels need next. Whoever builds an engine sees to that.
    Raises RuntimeError if `native` is asked for and cannot be had.
    """
    refusal = None if name == "torch" else native_refusal(device, dtype)
    if name == "native" and refusal is not None:
        raise RuntimeError(f"native kernels cannot be used: {refusal}")
    library = load_cpu_library().library
    if name != "torch" and refusal is None and library is not None:
        return NativeKernels(library, dtype, num_threads or default_num_threads())
    linears = "plain"
    if device.type == "cpu" and packing_refusal(dtype) is None:
        linears = "oneDNN packed"
    why = "" if refusal is None or device.type != "cpu" else f"; no native kernels: {refusal}"
    return TorchKernels(f"torch ({linears} linears{why})")


def native_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the native kernels do not serve this device and dtype; None if they do."""
    if device.type != "cpu":
        return f"they are for CPUs, not for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they are for float32 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
    return load_cpu_library().refusal
