"""The definition of quantised rows of keys and values: how they are made, and what they stand for.

In 8 bits a row x is n * scale, with scale = max |x| / 127 rounded to bf16 and whole numbers n in
[-127, 127]. In 4 bits it is (n - 8) * scale + zero, with scale = (max x - min x) / 15 and zero =
min x + 8 scale, both rounded to bf16, and n in [0, 15]. Whole numbers are rounded to the nearest,
halves to even. A row with a NaN or an infinity has the scale NaN.

R rows, D values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.interface.kv_form import SCALE_DTYPE, KVForm, KVPages

_LEAST_MAGNITUDE = 2.0**-100  # rows below it count as zeros


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows as they lie in pages, [.., elements of a row], and their scales [.., scales of a row].

    The first `split` values have the first scale, the rest the second; None: all have the first.
    """

    numbers: Tensor
    scales: Tensor
    form: KVForm
    split: int | None = None

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.numbers.shape[-1] * (2 if self.form.bits == 4 else 1)

    def floats(self) -> Tensor:
        """Returns the rows as they are meant, [.., D] in fp32."""
        scales = self.scales.float()
        first, second = scales[..., :1], scales[..., 1:]
        if self.form.bits == 4:
            low, high = self.numbers & 15, self.numbers >> 4
            return (torch.cat((low, high), -1).float() - 8.0) * first + second
        numbers = self.numbers.float()
        if self.split is None:
            return numbers * first
        scale = torch.where(torch.arange(self.width) < self.split, first, second)
        return numbers * scale


def page_rows(pages: KVPages) -> tuple[Tensor | QuantisedRows, Tensor | QuantisedRows]:
    """Returns the keys and the values of pages, whatever their form."""
    if pages.form.bits is None:
        return pages.keys, pages.values
    assert pages.key_scales is not None and pages.value_scales is not None, "pages without scales"
    is_latent = pages.keys.data_ptr() == pages.values.data_ptr()
    split = pages.values.shape[-1] if is_latent else None
    return (
        QuantisedRows(pages.keys, pages.key_scales, pages.form, split),
        QuantisedRows(pages.values, pages.value_scales, pages.form),
    )


def quantised(x_RD: Tensor, form: KVForm) -> QuantisedRows:
    """Quantises rows, given in fp32."""
    least_R1, most_R1 = x_RD.amin(-1, keepdim=True), x_RD.amax(-1, keepdim=True)
    is_finite_R1 = x_RD.isfinite().all(-1, keepdim=True)
    if form.bits == 4:
        spread_R1, parts, zero_scale = most_R1 - least_R1, 15.0, 8.0
        is_finite_R1 = is_finite_R1 & spread_R1.isfinite()
    else:
        spread_R1, parts, zero_scale = torch.maximum(-least_R1, most_R1), 127.0, 0.0
    whole_R1 = torch.full_like(spread_R1, parts)  # torch divides by a number in another way
    is_usable_R1 = is_finite_R1 & (spread_R1 >= _LEAST_MAGNITUDE)
    scale_R1 = (spread_R1 / whole_R1).to(SCALE_DTYPE).where(is_usable_R1, 0.0)
    scale_R1 = scale_R1.where(is_finite_R1, torch.nan)
    divisor_R1 = scale_R1.float().where(is_usable_R1, 1.0)
    if form.bits == 8:
        numbers_RD = torch.round(x_RD / divisor_R1).clamp(-127.0, 127.0)
        numbers_RD = numbers_RD.where(is_usable_R1, 0.0)
        return QuantisedRows(numbers_RD.to(torch.int8), scale_R1, form)
    zero_R1 = (least_R1 + zero_scale * scale_R1.float()).to(SCALE_DTYPE)
    zero_R1 = zero_R1.where(is_finite_R1, torch.nan)
    numbers_RD = torch.round((x_RD - zero_R1.float()) / divisor_R1) + zero_scale
    numbers_RD = numbers_RD.clamp(0.0, 15.0).where(is_usable_R1, zero_scale).to(torch.uint8)
    low_RD, high_RD = numbers_RD.chunk(2, dim=-1)
    return QuantisedRows(low_RD | high_RD << 4, torch.cat((scale_R1, zero_R1), -1), form)


def rotated(x: Tensor, block: int) -> Tensor:
    """Multiplies each block of values by the orthonormal Hadamard matrix; `block` 0: leave them."""
    if not block:
        return x
    shape, half = x.shape, 1
    while half < block:
        pairs = x.reshape(*shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).reshape(shape)
        half *= 2
    return x * torch.tensor(block).rsqrt()


def store_rows(pages: KVPages, keys_RD: Tensor, values_RD: Tensor | None, rows_R: Tensor) -> None:
    """Writes new keys and values, in fp32, to the rows of pages seen as [.., D].

    `values_RD` None: the values are a part of the keys (latent attention).
    """
    if pages.form.bits is None:
        _put(pages.keys, keys_RD.to(pages.keys.dtype), rows_R)
        if values_RD is not None:
            _put(pages.values, values_RD.to(pages.values.dtype), rows_R)
        return
    assert pages.key_scales is not None and pages.value_scales is not None, "pages without scales"
    if values_RD is None:
        split = pages.values.shape[-1]
        parts = [quantised(part, pages.form) for part in (keys_RD[:, :split], keys_RD[:, split:])]
        _put(pages.keys, torch.cat([part.numbers for part in parts], -1), rows_R)
        _put(pages.key_scales, torch.cat([part.scales for part in parts], -1), rows_R)
        return
    for data, scales, x_RD in (
        (pages.keys, pages.key_scales, rotated(keys_RD, pages.form.rotation(keys_RD.shape[-1]))),
        (pages.values, pages.value_scales, values_RD),
    ):
        new = quantised(x_RD, pages.form)
        _put(data, new.numbers, rows_R)
        _put(scales, new.scales, rows_R)


def _put(pages: Tensor, rows: Tensor, rows_R: Tensor) -> None:
    pages.view(-1, rows.shape[-1]).index_copy_(0, rows_R, rows)
