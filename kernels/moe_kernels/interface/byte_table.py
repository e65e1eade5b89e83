"""Looks up the values of a byte: the first step of every dequantisation.

A byte holds one value (int8, fp8) or two (int4, fp4: the low four bits come first). A table has
the 256 answers in float32, in which all of them are exact, so looking up loses nothing, and it is
several times faster than converting value by value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# OCP Microscaling Formats (MX) v1.0, table 5: E2M1, a sign bit above these eight magnitudes.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 0x80


class ByteTable:
    """256 bytes -> their values.

    Whole numbers have codes from 0 up: a value is its code - `offset`. Two's complement becomes
    that by turning the sign bit over. Floats are their own codes, with `offset` 0.
    """

    def __init__(
        self, values_256v: npt.NDArray[np.float32], offset: int = 0, is_signed: bool = False
    ) -> None:
        self.num_values = values_256v.shape[1]
        self.offset, self._is_signed = offset, is_signed
        assert self.num_values in (1, 2), f"{self.num_values} values of a byte"
        # One or two floats are one item, so that a look-up copies them together.
        item = np.dtype(np.float32 if self.num_values == 1 else np.complex64)
        self._items = np.ascontiguousarray(values_256v).view(item).reshape(256)

    def decode(self, bytes_NB: Tensor) -> Tensor:
        """[N, B] uint8 -> [N, B * values of a byte] float32, in memory of its own."""
        if bytes_NB.device.type == "cpu":
            return torch.from_numpy(self._items.take(bytes_NB.numpy()).view(np.float32))
        values = torch.from_numpy(self._items.view(np.float32)).view(256, self.num_values)
        return values.to(bytes_NB.device)[bytes_NB.long()].flatten(1)

    def codes(self, bytes_NB: Tensor) -> Tensor:
        """[N, B] uint8 -> [N, B * values of a byte] uint8."""
        if self.num_values == 2:
            return torch.stack((bytes_NB & 15, bytes_NB >> 4), dim=-1).flatten(1)
        return bytes_NB ^ _SIGN if self._is_signed else bytes_NB


def transposed_bytes(words_KN: Tensor) -> Tensor:
    """[K, N] words packed along K -> [N, bytes of K] uint8, the lowest bits of a word first."""
    words_NK = words_KN.t().clone(memory_format=torch.contiguous_format)
    return words_NK.view(torch.uint8)


def _halves(values_16: npt.NDArray[np.float32], offset: int = 0) -> ByteTable:
    """Two values in a byte: its low four bits, then its high ones."""
    byte = np.arange(256)
    return ByteTable(np.stack([values_16[byte & 15], values_16[byte >> 4]], axis=1), offset)


def _bytes_as(dtype: torch.dtype) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = (
        torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    )
    return values[:, None]


UINT4 = _halves(np.arange(16, dtype=np.float32))
UINT8 = ByteTable(_bytes_as(torch.uint8))
# Signed values stored with an offset of half their range: 0 stands for -8 or -128.
OFFSET4 = _halves(np.arange(-8, 8, dtype=np.float32), 8)
OFFSET8 = ByteTable(_bytes_as(torch.uint8) - 128, 128)
INT8 = ByteTable(_bytes_as(torch.int8), 128, is_signed=True)
E4M3 = ByteTable(_bytes_as(torch.float8_e4m3fn))
E2M1 = _halves(np.array([s * m for s in (1, -1) for m in _E2M1_MAGNITUDES], dtype=np.float32))
# The same, table 7: a scale that is an exponent alone, 2 to the (byte - 127); 255 is NaN.
E8M0 = ByteTable(
    np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan], dtype=np.float32)[:, None]
)
