"""Rounds matrices to the forms that the CPU kernels hold: the nearest values, a scale for the
largest of a group.

N outputs, K inputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.interface.quantised_matrix import (
    E2M1,
    E4M3,
    OFFSET4,
    OFFSET8,
    ByteTable,
    MatrixForm,
    QuantisedMatrix,
    Weight,
)

_FORMS: dict[str, tuple[MatrixForm, ByteTable, float]] = {
    "int4": (MatrixForm(values="int4", scales="bfloat16", group=32), OFFSET4, 7.0),
    "int4-128": (MatrixForm(values="int4", scales="bfloat16", group=128), OFFSET4, 7.0),
    "int8": (MatrixForm(values="int8", scales="bfloat16", group=32), OFFSET8, 127.0),
    "mxfp4": (MatrixForm(values="e2m1", scales="e8m0", group=32), E2M1, 4.0),
    "fp8": (MatrixForm(values="e4m3", scales="float32", group=128, block_rows=128), E4M3, 448.0),
}
WEIGHTS = ("floats", *_FORMS)
_EXPONENT_BIAS = 127  # of E8M0


def stored(weight_NK: Tensor, name: str) -> Weight:
    """Returns the matrix in the form of this name; "floats": as it is."""
    if name == "floats":
        return weight_NK
    form, table, most = _FORMS[name]
    grouped_NGC = weight_NK.float().unflatten(1, (-1, form.group))
    scales_NG = grouped_NGC.abs().amax(2) / most
    if form.scales == "e8m0":
        exponents_NG = scales_NG.log2().ceil()
        scales_NG, stored_NG = exponents_NG.exp2(), (exponents_NG + _EXPONENT_BIAS).byte()
    else:
        stored_NG = scales_NG.to(getattr(torch, form.scales))
        scales_NG = stored_NG.float()
    values_NK = (grouped_NGC / scales_NG[:, :, None]).flatten(1)
    return QuantisedMatrix(
        form=form,
        table=table,
        bytes_NB=_codes(values_NK, form, table),
        num_columns=weight_NK.shape[1],
        scales_NG=stored_NG,
        product_dtype=torch.float32 if table in (E2M1, E4M3) else stored_NG.dtype,
    )


def _codes(values_NK: Tensor, form: MatrixForm, table: ByteTable) -> Tensor:
    if form.values == "e4m3":
        return values_NK.to(torch.float8_e4m3fn).view(torch.uint8)
    if form.values == "e2m1":
        known_16 = E2M1.decode(torch.arange(16, dtype=torch.uint8)[:, None])[:, 0]
        codes_NK = (values_NK[:, :, None] - known_16).abs().argmin(2)
    else:
        limit = 2 ** (form.value_bits - 1)
        codes_NK = values_NK.round().clamp(-limit, limit - 1) + table.offset
    codes_NK = codes_NK.to(torch.uint8)
    return codes_NK if form.value_bits == 8 else codes_NK[:, ::2] | codes_NK[:, 1::2] << 4
