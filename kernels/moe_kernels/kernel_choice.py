"""Chooses the set of kernels for a device and dtype. No other module decides this."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shutil
from typing import Literal

import torch

from moe_kernels.cpu.cpu_library import load_cpu_library
from moe_kernels.cpu.native_kernels import NativeKernels
from moe_kernels.interface.kernels import Kernels
from moe_kernels.interface.quantised_matrix import LowBitProducts
from moe_kernels.reference.linear import packing_refusal
from moe_kernels.reference.torch_kernels import TorchKernels

KernelsName = Literal["auto", "native", "torch", "triton"]

_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FIRST_CAPABILITY = 8  # of the chips that the Triton kernels know: sm_80


@functools.lru_cache(maxsize=1)
def default_num_threads() -> int:
    """Torch's number of threads when first asked: OMP_NUM_THREADS, or the machine's cores."""
    return torch.get_num_threads()


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    name: KernelsName = "auto",
    num_threads: int | None = None,
    low_bit_products: LowBitProducts = "exact",
) -> Kernels:
    """`auto`: native on a CPU where it can be built, triton on a CUDA GPU, else torch. The set's
    name says why.

    Kernels with threads of their own want torch to have one: its workers spin for a while after
    each use, on the cores that the kernels need next. The builder of an engine sets that.
    `low_bit_products`: of the CPU sets; triton has exact ones alone.
    Raises RuntimeError if `native` or `triton` is asked for and cannot be had.
    """
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        refusal = triton_refusal(device, dtype)
        if refusal is None and low_bit_products != "exact":
            raise RuntimeError(
                f"low_bit_products {low_bit_products} works on CPUs only, not with the triton "
                "kernels"
            )
        if refusal is None:
            from moe_kernels.gpu.gpu_kernels import make_triton_kernels  # imports triton

            return make_triton_kernels(device, dtype)
        if name == "triton":
            raise RuntimeError(f"triton kernels cannot be used: {refusal}")
        return TorchKernels(f"torch (plain linears; no triton kernels: {refusal})")
    refusal = None if name == "torch" else native_refusal(device, dtype)
    if name == "native" and refusal is not None:
        raise RuntimeError(f"native kernels cannot be used: {refusal}")
    library = load_cpu_library().library
    if name != "torch" and refusal is None and library is not None:
        threads = num_threads or default_num_threads()
        return NativeKernels(library, dtype, threads, low_bit_products)
    if device.type != "cpu":
        return TorchKernels("torch (plain linears)")
    linears = "oneDNN packed" if packing_refusal(dtype) is None else "plain"
    why = "" if refusal is None else f"; no native kernels: {refusal}"
    words = f"torch ({linears} linears, {torch_instructions()}{why})"
    return TorchKernels(words, low_bit_products)


def kernels_build() -> str:
    """Name the builds of the kernels of this process: bits may differ between two builds."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{load_cpu_library().build or 'no library'}, torch {torch.__version__}, {capability}"


def torch_instructions() -> str:
    """Returns the vector instructions that torch's own kernels use on this CPU."""
    name = torch.backends.cpu.get_cpu_capability()
    if name == "DEFAULT":
        is_arm = platform.machine().lower() in ("aarch64", "arm64")
        return "NEON" if is_arm else "no vector instructions"
    return name.replace("AVX512", "AVX-512")


def native_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the native kernels do not serve this device and dtype; None if they do."""
    if device.type != "cpu":
        return f"they are for CPUs, not for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they are for float32 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
    return load_cpu_library().refusal


def triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels do not serve this device and dtype; None if they do.

    In Triton's interpreter (TRITON_INTERPRET=1, for tests: very slow) they serve a CPU. Imports
    nothing of triton.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'moe-serve[gpu]')"
    if dtype not in _TRITON_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"they are for float32, float16 and bfloat16, not for {name}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 is for a CPU"
    if device.type != "cuda":
        return f"they are for CUDA GPUs, not for {device.type}"
    if torch.version.hip is not None:
        return "they are for NVIDIA GPUs, and this torch is built for AMD's"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _FIRST_CAPABILITY:
        return f"they need sm_{_FIRST_CAPABILITY}0 or newer, and this GPU is sm_{major}{minor}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return (
            "triton compiles the launchers of its kernels with a C compiler, and there is no "
            "gcc or clang"
        )
    return None
