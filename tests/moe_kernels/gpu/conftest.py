"""Runs Triton's interpreter if there is no CUDA device, and skips tests if there is no triton.

TRITON_INTERPRET is read when a kernel is decorated, so it is set here, before a test imports one.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_DEVICE = torch.cuda.is_available()
Values = NDArray[np.float32]


def remember_builtins() -> None:
    """Makes the interpreter replace the functions of `tl` once per launch, by functions that are
    made once. Without this it searches for them at every launch and every call of a kernel's own
    function, which takes a third of its time."""
    from triton.runtime import interpreter

    replaced: dict[object, list[tuple[str, object]]] = {}
    active = SimpleNamespace()  # an attribute for each package whose functions are replaced now

    def interpreted(member: Any) -> object:
        def call(*args: Any, _semantic: object = None, **kwargs: Any) -> Any:
            return member(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        return call

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        mark = f"package_{id(package)}"
        if hasattr(active, mark):
            return
        scope.set_attr(active, mark, True)  # the scope also takes it back
        if package not in replaced:
            members = inspect.getmembers(package)
            replaced[package] = [
                (name, interpreted(each))
                for name, each in members
                if interpreter.tl.core.is_builtin(each)
            ]
        for name, member in replaced[package]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch_builtin
    # This one makes a table of all types at each call.
    of_type, of_number = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def numpy_type(dtype: Any) -> Any:
        return of_type(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)

    interpreter._get_np_dtype = numpy_type


def remember_types() -> None:
    """Makes the interpreter compute the properties of a shape once, and not for every value.

    It also leaves out the interpreter's search for overflows, which it makes in most operations on
    integers and whose result it drops: without the option `debug` it asserts nothing.
    """
    from triton.runtime import interpreter

    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    make_block_type, known = core.block_type.__init__, dict[object, dict[str, Any]]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (element_ty, sizes) if type(element_ty) is core.dtype else None
        if key in known:
            self.__dict__.update(known[key])
            return
        make_block_type(self, element_ty, shape)
        if key is not None:
            known[key] = dict(self.__dict__)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([*map(core.constexpr, sizes)])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


if HAS_TRITON and not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.support.kernels import bf16_shim

    bf16_shim.install()
    remember_builtins()
    remember_types()


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
    """Computes dots as a sum over k for all rows at once, because the BLAS behind the interpreter
    gives rows bits that depend on their place. A GPU's matrix instructions add every row in one
    order."""

    def product(a: Values, b: Values, dtype: object = None) -> Values:
        total: Values = np.add.reduce(a.T[:, :, None] * b[:, None, :], axis=0)
        return total if dtype is None else total.astype(dtype)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "matmul", product)
