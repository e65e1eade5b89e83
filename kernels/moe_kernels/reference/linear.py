"""Linear layers whose weight is packed once, at load.

On a CPU that oneDNN serves, the weight is reordered into oneDNN's blocked layout and the original
can be dropped: 1.4-3.6x faster than F.linear for few rows, and row-invariant. Elsewhere a plain
F.linear; in fp32 on a CPU it takes 16 rows at a time, padded, because MKL sums in an order that
depends on how many rows there are (up to 7 on AMD CPUs, any number on Intel's).

T rows, N outputs, K inputs.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS_AT_A_TIME = 16
_WIDE = 1024  # oneDNN sums a single row of more inputs in another order than two rows


class PackedLinear:
    """oneDNN's blocked weight. A single wide row is computed twice, as two rows."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous())
        # oneDNN takes the bias by its address and reads it as if it were contiguous.
        self.bias = None if bias_N is None else bias_N.clone(memory_format=torch.contiguous_format)

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        out = self._pointwise(x_TK, "none")
        return out if residual_TN is None else residual_TN + out

    def silu(self, x_TK: Tensor) -> Tensor:
        """silu(x W^T), the activation applied to the fp32 sums before they are rounded."""
        return self._pointwise(x_TK, "swish")

    def times(self, x_TK: Tensor, other_TN: Tensor) -> Tensor:
        """(x W^T) * other, rounded once."""
        rows, others = _at_least_two(x_TK, x_TK), _at_least_two(x_TK, other_TN)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, others, self.weight, self.bias, "mul"
        )
        return out if rows is x_TK else out[:1]

    def _pointwise(self, x_TK: Tensor, activation: str) -> Tensor:
        rows = _at_least_two(x_TK, x_TK)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, activation, [], ""
        )
        return out if rows is x_TK else out[:1]


def _at_least_two(x_TK: Tensor, rows: Tensor) -> Tensor:
    is_single_and_wide = x_TK.shape[0] == 1 and x_TK.shape[1] > _WIDE
    return rows.expand(2, -1).contiguous() if is_single_and_wide else rows


class PlainLinear:
    """F.linear, in calls of one size where that keeps a CPU's rows invariant."""

    __slots__ = ("bias", "is_in_blocks", "weight")

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight, self.bias = weight_NK, bias_N
        self.is_in_blocks = weight_NK.device.type == "cpu" and weight_NK.dtype == torch.float32

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        out = self._blocks(x_TK) if self.is_in_blocks else F.linear(x_TK, self.weight, self.bias)
        return out if residual_TN is None else residual_TN + out

    def _blocks(self, x_TK: Tensor) -> Tensor:
        num_rows = x_TK.shape[0]
        padded = F.pad(x_TK, (0, 0, 0, -num_rows % _ROWS_AT_A_TIME))
        blocks = [F.linear(x, self.weight, self.bias) for x in padded.split(_ROWS_AT_A_TIME)]
        return torch.cat(blocks)[:num_rows]

    def silu(self, x_TK: Tensor) -> Tensor:
        """silu(x W^T), from operations whose result does not depend on a value's position."""
        gate_TN = self(x_TK).float()
        return (gate_TN / (1.0 + torch.exp(-gate_TN))).to(x_TK.dtype)

    def times(self, x_TK: Tensor, other_TN: Tensor) -> Tensor:
        """(x W^T) * other."""
        return self(x_TK) * other_TN


FastLinear = PackedLinear | PlainLinear


@functools.lru_cache(maxsize=8)
def packing_refusal(dtype: torch.dtype) -> str | None:
    """Returns why CPU weights of this dtype are not packed; None if they are. Probed once."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"oneDNN packs float32 and bfloat16 here, not {dtype}".replace("torch.", "")
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    try:
        packed = PackedLinear(weight)
        gate, out = packed.silu(x), packed(x)
        product = packed.times(x, gate)
    except (RuntimeError, AttributeError) as error:
        return f"oneDNN refused: {str(error).splitlines()[0]}"
    expected = F.linear(x.double(), weight.double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    fits = torch.allclose(out.double(), expected, rtol=tolerance, atol=tolerance)
    fits &= torch.allclose(gate.double(), F.silu(expected), rtol=tolerance, atol=tolerance)
    fits &= torch.allclose(product.double(), expected * gate, rtol=tolerance, atol=tolerance)
    if not fits:
        return "oneDNN's packed linear failed its self-check"
    if not _is_row_invariant(dtype):
        return (
            "oneDNN's sums depend on the number of rows: ONEDNN_MAX_CPU_ISA was set too "
            "late or too high"
        )
    return None


def _is_row_invariant(dtype: torch.dtype) -> bool:
    """Checks that rows have the same bits as in a larger batch; with AMX they do not."""
    generator = torch.Generator().manual_seed(1)
    packed = PackedLinear(torch.randn(1024, 1024, generator=generator).to(dtype))
    x = torch.randn(129, 1024, generator=generator).to(dtype)
    whole = packed(x)
    return all(torch.equal(packed(x[:rows]), whole[:rows]) for rows in (2, 8, 16, 24, 32))


def make_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> FastLinear:
    """Returns the fastest row-invariant linear for this weight. May keep or replace `weight_NK`."""
    if weight_NK.device.type == "cpu" and packing_refusal(weight_NK.dtype) is None:
        return PackedLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK.contiguous(), bias_N)
