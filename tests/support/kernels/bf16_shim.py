"""bfloat16 in Triton's interpreter, for tests.

The interpreter keeps a bf16 value as its 16 bits in an unsigned integer, and most operations then
compute on those integers: the results are wrong and no error is raised. This shim computes on the
values instead. Two operations still fail: sums of bf16 (upcast first) and atomics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

Bits = NDArray[np.uint16]
Values = NDArray[np.float32]

PATCHED = ("binary_op", "unary_op", "ternary_op", "create_dot", "create_fma", "cast_impl")
QUIET_NAN = 0x7FC0


def up(bits: Bits) -> Values:
    """Returns the values of bf16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def down(values: NDArray[Any]) -> Bits:
    """Returns the bf16 bits nearest to the values, ties to even, as torch and the hardware
    round."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), np.uint32(QUIET_NAN), rounded).astype(np.uint16)


def install() -> None:
    """Patches the interpreter's builder; a second call does nothing."""
    builder: Any = interpreter.InterpreterBuilder
    if hasattr(builder, "originals_of_bf16_shim"):
        return
    missing = [name for name in PATCHED if not hasattr(builder, name)]
    assert not missing, f"this triton's interpreter has no {missing}: bf16_shim.py must follow it"
    assert hasattr(interpreter.ReduceOps, "sum"), "this triton's interpreter sums elsewhere"
    builder.originals_of_bf16_shim = {name: getattr(builder, name) for name in PATCHED}
    for name in PATCHED:
        setattr(builder, name, globals()[f"_{name}"])
    builder.get_bf16 = _get_bf16  # some versions have none
    original_sum = interpreter.ReduceOps.sum

    def sum_of_others(self: Any, input: Any) -> Any:
        assert not _is_bf16(input.handle), "tl.sum of bf16: the kernel must upcast first"
        return original_sum(self, input)

    interpreter.ReduceOps.sum = sum_of_others


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _original(self: Any, name: str) -> Any:
    return self.originals_of_bf16_shim[name].__get__(self)


def _lifted(handle: Any) -> NDArray[Any]:
    return up(handle.data) if _is_bf16(handle) else handle.data


def _lowered(output: NDArray[Any]) -> Any:
    if output.dtype == np.bool_:
        return interpreter.TensorHandle(output, tl.int1)
    return interpreter.TensorHandle(down(output), tl.bfloat16)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if not (_is_bf16(lhs) or _is_bf16(rhs)):
        return _original(self, "binary_op")(lhs, rhs, op)
    return _lowered(op(_lifted(lhs), _lifted(rhs)))


def _unary_op(self: Any, arg: Any, op: Any) -> Any:
    if not _is_bf16(arg):
        return _original(self, "unary_op")(arg, op)
    return _lowered(op(_lifted(arg)))


def _ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
    """Clamps by value. A choice between bits (np.where) is correct without a change."""
    if op is np.where or not _is_bf16(other):
        return _original(self, "ternary_op")(lhs, rhs, other, op)
    return _lowered(op(_lifted(lhs), _lifted(rhs), _lifted(other)))


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if not _is_bf16(z):
        return _original(self, "create_fma")(x, y, z)
    return _lowered(_lifted(x) * _lifted(y) + _lifted(z))


def _create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """Multiplies bf16 exactly in fp32 and adds in fp32, as the hardware does."""
    if not (_is_bf16(a) and _is_bf16(b)):
        return _original(self, "create_dot")(a, b, d, *precision)
    product = np.matmul(up(a.data), up(b.data))
    if _is_bf16(d):
        return _lowered(product + up(d.data))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
    goal = dst_type.scalar
    if _is_bf16(src) and goal != tl.bfloat16:
        lifted = interpreter.TensorHandle(up(src.data), tl.float32)
        return lifted if goal == tl.float32 else _original(self, "cast_impl")(lifted, dst_type)
    if goal == tl.bfloat16 and not _is_bf16(src):
        return interpreter.TensorHandle(down(src.data), tl.bfloat16)
    return _original(self, "cast_impl")(src, dst_type)


def _get_bf16(self: Any, value: float) -> Any:
    return interpreter.TensorHandle(down(np.array([value])), tl.bfloat16)
