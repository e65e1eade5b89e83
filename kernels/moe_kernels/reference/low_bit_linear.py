"""Linear layers of quantised matrices in plain torch, converted in every call: small, and slow.

T rows, N outputs, K inputs.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.interface.quantised_matrix import (
    ROW_GROUP,
    LowBitProducts,
    QuantisedMatrix,
    Weight,
)
from moe_kernels.reference.int8_rows import Int8Matrix, int8_product, quantised_rows
from moe_kernels.reference.linear import FastLinear, make_linear


class QuantisedLinear:
    """A matrix in few bits. Its results have the bits of a layer that is dequantised at load."""

    __slots__ = ("bias", "matrix")

    def __init__(self, matrix: QuantisedMatrix, bias_N: Tensor | None) -> None:
        self.matrix, self.bias = matrix, bias_N

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        return make_linear(self.matrix.dequantised(x_TK.dtype), self.bias)(x_TK, residual_TN)


class Int8Linear:
    """A matrix in few bits that is multiplied with quantised rows, as int8_rows.py defines."""

    __slots__ = ("bias", "matrix")

    def __init__(self, matrix: QuantisedMatrix, bias_N: Tensor | None) -> None:
        self.matrix, self.bias = matrix, None if bias_N is None else bias_N.float()

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        out_TN = int8_product(quantised_rows(x_TK), Int8Matrix(self.matrix))
        if self.bias is not None:
            out_TN = out_TN + self.bias
        rounded_TN = out_TN.to(x_TK.dtype)
        return rounded_TN if residual_TN is None else rounded_TN + residual_TN


AnyLinear = FastLinear | QuantisedLinear | Int8Linear


def made_linear(
    weight: Weight, bias_N: Tensor | None = None, products: LowBitProducts = "exact"
) -> AnyLinear:
    """Makes a layer of floats or of few bits. May keep or replace a tensor; copies a matrix."""
    if isinstance(weight, Tensor):
        return make_linear(weight, bias_N)
    has_groups = weight.num_columns % ROW_GROUP == 0 and weight.form.can_quantise_rows
    made = Int8Linear if products == "int8" and has_groups else QuantisedLinear
    return made(weight.clone(), bias_N)
