"""Runs Triton's interpreter if there is no CUDA device, and skips tests if there is no triton.

TRITON_INTERPRET is read when a kernel is decorated, so it is set here, before a test imports one.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_DEVICE = torch.cuda.is_available()


if HAS_TRITON and not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support.kernels import bf16_shim, quick_interpreter

    bf16_shim.install()
    quick_interpreter.install()


class ModuleWithoutTriton(pytest.Module):
    """A test file that is skipped without an import."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:  # type: ignore[override]
        pytest.skip("triton is not installed")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if HAS_TRITON:
        return None  # pytest's own
    return ModuleWithoutTriton.from_parent(parent, path=module_path)


@pytest.fixture
def device() -> torch.device:
    """The device of the kernels under test: a GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if HAS_DEVICE else "cpu")


@pytest.fixture(autouse=True)
def _lanes_may_overflow() -> Iterator[None]:
    """Silences numpy's warnings about masked lanes that hold inf - inf, which a GPU does not
    report."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _minima_pass_over_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter's min and max ignore NaN, as a GPU does unless it is asked to keep NaN.
    The interpreter always keeps it, and so would hide a kernel that does not."""
    if HAS_DEVICE or not HAS_TRITON:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    for name, chosen in (("create_minnumf", np.fmin), ("create_maxnumf", np.fmax)):
        monkeypatch.setattr(
            InterpreterBuilder,
            name,
            lambda self, lhs, rhs, chosen=chosen: self.binary_op(lhs, rhs, chosen),
        )


@pytest.fixture
def rows_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a dot whose elements depend on their row and column alone: float64, rounded once.

    The BLAS behind the interpreter adds in an order that follows the shape, and gives rows bits
    that depend on their place. With this dot, the remaining differences come from the blocks that a
    kernel adds, and their order. A GPU keeps its own dots, which add every row in one order.
    """
    matmul = np.matmul

    def product(a: NDArray[Any], b: NDArray[Any], dtype: Any = None) -> NDArray[Any]:
        sums: NDArray[Any] = matmul(a.astype(np.float64), b.astype(np.float64))
        return sums.astype(dtype or np.result_type(a, b))

    monkeypatch.setattr(np, "matmul", product)
