"""The interpreter's bf16, with the shim, against torch on the CPU; bit for bit where exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from tests.support.kernels import bf16_shim

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the card has its own bf16")


@triton.jit
def every_operation(x_ptr, y_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + N + at, x * y)
    tl.store(out_ptr + 2 * N + at, -x)
    tl.store(out_ptr + 3 * N + at, tl.where(x > y, x, y))
    tl.store(out_ptr + 4 * N + at, x * 0.5)
    tl.store(out_ptr + 5 * N + at, tl.maximum(x, y))
    tl.store(out_ptr + 6 * N + at, tl.full((N,), 3.14159, tl.bfloat16))
    tl.store(out_ptr + 7 * N + at, at.to(tl.bfloat16))
    tl.store(out_ptr + 8 * N + at, tl.fma(x, y, x))


@triton.jit
def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiplies a [M, N] and b [N, M] and returns [M, M] in fp32."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * N + n[None, :])
    b = tl.load(b_ptr + n[:, None] * M + m[None, :])
    tl.store(out_ptr + m[:, None] * M + m[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def cast(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def careless_sum(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), axis=0))


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(size[0]))


def test_operations_are_torchs() -> None:
    x, y = random(64).bfloat16(), random(2, 64)[1].bfloat16()
    out = torch.empty(9, 64, dtype=torch.bfloat16)
    every_operation[(1,)](x, y, out, 64)
    expected = [
        x + y,
        x * y,
        -x,
        torch.maximum(x, y),
        x * 0.5,
        torch.maximum(x, y),
        torch.full((64,), 3.14159, dtype=torch.bfloat16),
        torch.arange(64).bfloat16(),
        (x.float() * y.float() + x.float()).bfloat16(),
    ]
    for i, row in enumerate(expected):
        assert torch.equal(out[i], row), f"operation {i}: {out[i][:4]} instead of {row[:4]}"


def test_products_add_up_in_fp32() -> None:
    a, b = random(16, 32).bfloat16(), random(32, 16).bfloat16()
    out = torch.empty(16, 16)
    product[(1,)](a, b, out, 16, 32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-5)


def test_casts_round_to_nearest_even() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3.4e38])
    x = torch.cat([random(4089), special])
    out = torch.empty(4096, dtype=torch.bfloat16)
    cast[(1,)](x, out, 4096)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    back = torch.empty(4096)
    cast[(1,)](out, back, 4096)
    torch.testing.assert_close(back, out.float(), rtol=0, atol=0, equal_nan=True)
    half = torch.empty(4096, dtype=torch.float16)
    cast[(1,)](out, half, 4096)
    torch.testing.assert_close(half, out.half(), rtol=0, atol=0, equal_nan=True)


def test_a_sum_of_bf16_fails() -> None:
    x, out = random(32).bfloat16(), torch.empty(1, dtype=torch.bfloat16)
    with pytest.raises(Exception) as failure:
        careless_sum[(1,)](x, out, 32)
    told = f"{failure.value} {failure.value.__cause__}"
    assert "upcast first" in told, f"the sum failed for another reason: {told}"


def test_an_unknown_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "InterpreterBuilder", type("Changed", (), {}))
    with pytest.raises(AssertionError, match="binary_op"):
        bf16_shim.install()


def test_ties_go_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000], dtype=np.uint32).view(np.float32)
    assert bf16_shim.down(ties).tolist() == [0x3F80, 0x3F82]
