"""The sets of kernels that this machine can run."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.choice import KernelsName, choose_kernels, native_refusal
from moe_kernels.interface.kernels import Kernels

_REFUSAL = native_refusal(torch.device("cpu"), torch.float32)
KERNEL_SETS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(_REFUSAL is not None, reason=str(_REFUSAL))),
]


def make_kernels(name: KernelsName, dtype: torch.dtype) -> Kernels:
    return choose_kernels(torch.device("cpu"), dtype, name)
