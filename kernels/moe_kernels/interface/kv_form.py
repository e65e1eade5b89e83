"""The form in which KV pages hold their rows: in the model's dtype, or in few bits.

A row is one token's key or value of one head. A quantised row has whole numbers and scales of its
own, made when it is written, so it depends on nothing but the token and those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KVDtype = Literal["auto", "int8", "int4"]

SCALE_DTYPE = torch.bfloat16  # a float's range, at two bytes
_MOST_ROTATED = 128  # width of the largest Hadamard matrix


@dataclass(frozen=True, slots=True)
class KVForm:
    """`bits` of a value; None: the model's dtype. With `is_rotated`, each block of a key's values
    and of the query's is multiplied by a Hadamard matrix, which spreads channels of large values
    over the block and changes no product of the two.
    """

    bits: Literal[8, 4] | None = None
    is_rotated: bool = False

    @property
    def name(self) -> KVDtype:
        return "auto" if self.bits is None else "int8" if self.bits == 8 else "int4"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the pages; None: the model's. A byte of 4 bits holds two values: value d of
        a row in the low bits, value d + D / 2 in the high bits."""
        return {None: None, 8: torch.int8, 4: torch.uint8}[self.bits]

    def row_width(self, width: int) -> int:
        """Returns the elements of the pages that a row of `width` values takes."""
        return width // 2 if self.bits == 4 else width

    def num_scales(self, num_parts: int) -> int:
        """Returns the scales of a row of parts: one each, and with 4 bits a zero as well."""
        if self.bits is None:
            return 0
        return 2 if self.bits == 4 else num_parts

    def row_bytes(self, width: int, num_parts: int, itemsize: int) -> int:
        """Returns the bytes of a row of `width` values; `itemsize` is that of the model's dtype."""
        if self.bits is None:
            return width * itemsize
        return self.row_width(width) + self.num_scales(num_parts) * SCALE_DTYPE.itemsize

    def rotation(self, width: int) -> int:
        """Returns the width of the Hadamard matrices for keys of `width` values; 0: none."""
        return min(width & -width, _MOST_ROTATED) if self.is_rotated else 0


FLOATS = KVForm()
_FORMS: dict[KVDtype, KVForm] = {
    "auto": FLOATS,
    "int8": KVForm(8),
    "int4": KVForm(4, is_rotated=True),
}


def kv_form(name: KVDtype) -> KVForm:
    """Returns the form that the configuration names."""
    return _FORMS[name]


def kv_form_refusal(form: KVForm, *, head_dim: int, value_dim: int, is_latent: bool) -> str | None:
    """Returns why attention of this shape cannot have pages of this form; None: it can."""
    if form.bits != 4:
        return None
    if is_latent:
        return "latent attention reads its values from the keys, which 4 bits cannot serve"
    if head_dim % 2 or value_dim % 2:
        return f"heads of {head_dim} and {value_dim} values cannot be cut into pairs"
    return None


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's keys [pages, Hkv, page size, D] and values [pages, Hkv, page size, Dv].

    With latent attention the values are the first Dv of each key: a view of the same memory. Pages
    in few bits have scales beside them, [pages, Hkv, page size, scales of a row] in SCALE_DTYPE: of
    a latent key, one for the latent and one for its rotated rest.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    form: KVForm = FLOATS
