"""Rows of keys and values in few bits: rotate, quantise, write into the pages.

The definition is moe_kernels/reference/torch_kv_rows.py. R rows, D values of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.interface.kv_form import KVForm, KVPages

LEAST_MAGNITUDE = tl.constexpr(2.0**-100)
ROUND_HALF_EVEN = tl.constexpr(12582912.0)  # added and taken away: the nearest whole number
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def quantise_rows(  # type: ignore[no-untyped-def]
    x_ptr, rows_ptr, numbers_ptr, scales_ptr, x_step, numbers_step, scales_step,
    WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [R, D] in fp32 -> rows of whole numbers and scales. Grid (R): a program takes one row.

    rows [R]; a negative row is not written. A row is loaded as two halves, BLOCK values each.
    """
    HALF: tl.constexpr = (WIDTH + 1) // 2
    row = tl.program_id(0).to(tl.int64)
    page_row = tl.load(rows_ptr + row).to(tl.int64)
    is_written = page_row >= 0
    at = tl.arange(0, BLOCK)
    is_low, is_high = at < HALF, HALF + at < WIDTH
    low = tl.load(x_ptr + row * x_step + at, mask=is_low, other=0.0)
    high = tl.load(x_ptr + row * x_step + HALF + at, mask=is_high, other=0.0)
    is_finite = tl.sum((low - low) + (high - high), axis=0) == 0.0
    most = tl.max(tl.maximum(tl.where(is_low, low, -LARGEST), tl.where(is_high, high, -LARGEST)), 0)
    least = tl.min(tl.minimum(tl.where(is_low, low, LARGEST), tl.where(is_high, high, LARGEST)), 0)
    spread = most - least if BITS == 4 else tl.maximum(-least, most)
    is_finite = is_finite & (spread <= LARGEST)
    is_usable = is_finite & (spread >= LEAST_MAGNITUDE)
    dtype = scales_ptr.dtype.element_ty
    parts = 15.0 if BITS == 4 else 127.0
    scale = tl.where(is_usable, tl.math.div_rn(spread, parts), 0.0)
    scale = tl.where(is_finite, scale, float("nan")).to(dtype)
    tl.store(scales_ptr + page_row * scales_step, scale, mask=is_written)
    divisor = tl.where(is_usable, scale.to(tl.float32), 1.0)
    numbers_ptr += page_row * numbers_step
    if BITS == 4:
        zero = tl.where(is_finite, least + 8.0 * scale.to(tl.float32), float("nan")).to(dtype)
        tl.store(scales_ptr + page_row * scales_step + 1, zero, mask=is_written)
        low = _nearest(low - zero.to(tl.float32), divisor, 8.0, 0.0, 15.0)
        high = _nearest(high - zero.to(tl.float32), divisor, 8.0, 0.0, 15.0)
        low = tl.where(is_usable, low, 8.0).to(tl.int32)
        high = tl.where(is_usable, high, 8.0).to(tl.int32)
        byte = (low | high << 4).to(tl.uint8)
        tl.store(numbers_ptr + at, byte, mask=is_low & is_written)
    else:
        low = tl.where(is_usable, _nearest(low, divisor, 0.0, -127.0, 127.0), 0.0)
        high = tl.where(is_usable, _nearest(high, divisor, 0.0, -127.0, 127.0), 0.0)
        tl.store(numbers_ptr + at, low.to(tl.int8), mask=is_low & is_written)
        tl.store(numbers_ptr + HALF + at, high.to(tl.int8), mask=is_high & is_written)


@triton.jit
def _nearest(x, divisor, shift, least, most):  # type: ignore[no-untyped-def]
    number = tl.math.div_rn(x, divisor + x * 0.0)
    number = (number + ROUND_HALF_EVEN) - ROUND_HALF_EVEN + shift
    return tl.minimum(tl.maximum(number, least), most)


@triton.jit
def rotate_rows(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, factor, WIDTH: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """x [R, D] in fp32 -> each block of ROTATION values times the Hadamard matrix.

    Grid (R, blocks of a row). The sign of (i, j) is the parity of the bits that i and j share.
    """
    start = tl.program_id(0).to(tl.int64) * WIDTH + tl.program_id(1) * ROTATION
    at = tl.arange(0, ROTATION)
    shared = at[:, None] & at[None, :]
    for shift in tl.static_range(0, 3):
        shared = shared ^ (shared >> (4 >> shift))
    sign = 1.0 - 2.0 * (shared & 1).to(tl.float32)
    x = tl.load(x_ptr + start + at)
    y = tl.sum(sign * x[None, :], axis=1) * factor
    tl.store(out_ptr + start + at, y)


def rotated(x: Tensor, form: KVForm, dtype: torch.dtype) -> Tensor:
    """Returns rows [.., D] in fp32 as a form of pages rotates keys and queries, in `dtype`."""
    width = x.shape[-1]
    rotation = form.rotation(width)
    if not rotation:
        return x.to(dtype)
    assert x.is_contiguous() and rotation < 256, f"rows of {rotation} values to rotate"
    out = torch.empty_like(x, dtype=dtype)
    grid = (x.numel() // width, width // rotation)
    rotate_rows[grid](
        x, out, rotation**-0.5, WIDTH=width, ROTATION=rotation, enable_fp_fusion=False
    )
    return out


def store_quantised(
    pages: KVPages, keys_RD: Tensor, values_RD: Tensor | None, rows: Tensor
) -> None:
    """Writes new keys and values, in fp32, to rows of the pages. A negative row is not written.

    `values_RD` None: the values are a part of the keys (latent attention).
    """
    form = pages.form
    assert pages.key_scales is not None and pages.value_scales is not None, "pages without scales"
    if values_RD is None:
        split = pages.values.shape[-1]
        _store(keys_RD[:, :split], rows, pages.keys, pages.key_scales, form)
        rest = keys_RD[:, split:]
        _store(rest, rows, pages.keys[..., split:], pages.key_scales[..., 1:], form)
        return
    _store(rotated(keys_RD, form, torch.float32), rows, pages.keys, pages.key_scales, form)
    _store(values_RD, rows, pages.values, pages.value_scales, form)


def _store(x_RD: Tensor, rows: Tensor, numbers: Tensor, scales: Tensor, form: KVForm) -> None:
    """`numbers` and `scales` are views of contiguous pages."""
    num_rows, width = x_RD.shape
    quantise_rows[(num_rows,)](
        x_RD, rows, numbers, scales, x_RD.stride(0), numbers.stride(-2), scales.stride(-2),
        WIDTH=width, BITS=form.bits, BLOCK=max(16, 1 << ((width + 1) // 2 - 1).bit_length()),
        enable_fp_fusion=False,
    )  # fmt: skip
