"""A process for test_imports.py: prints the modules of Triton that an engine on a CPU loads."""

from __future__ import annotations

import sys

import torch

import moe_serve.engine.build  # noqa: F401
from moe_kernels.kernel_choice import choose_kernels


def main() -> None:
    choose_kernels(torch.device("cpu"), torch.float32, "torch")
    found = [name for name in sys.modules if name == "triton" or name.startswith("moe_kernels.gpu")]
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
