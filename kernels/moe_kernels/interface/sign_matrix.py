"""An addition to a weight matrix that stores one bit per weight: its sign, times a scale.

    added[n, k] = scale[n] * (1 if bit[n, k] else -1)

N outputs, K inputs, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SignMatrix:
    """The signs of a matrix [N, K], their scales, and an addition to the layer's bias."""

    bits_NB: Tensor  # uint8; eight inputs in a byte, the first one lowest
    num_columns: int
    scales_N: Tensor  # fp32, [N] or [1]: the same for all rows
    bias_N: Tensor | None = None  # fp32

    @property
    def num_rows(self) -> int:
        return len(self.bits_NB)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        bias_bytes = 0 if self.bias_N is None else self.bias_N.nbytes
        return self.bits_NB.nbytes + self.scales_N.nbytes + bias_bytes

    def to(self, device: torch.device) -> SignMatrix:
        bias_N = None if self.bias_N is None else self.bias_N.to(device)
        parts = self.bits_NB.to(device), self.scales_N.to(device)
        return replace(self, bits_NB=parts[0], scales_N=parts[1], bias_N=bias_N)

    def every_scale(self) -> Tensor:
        """Returns the scale of each row, [N]."""
        return self.scales_N.expand(self.num_rows)

    def rows(self, wanted: slice | Tensor) -> SignMatrix:
        """Returns some of the rows, or all in another order."""
        scales_N = self.scales_N if len(self.scales_N) == 1 else self.scales_N[wanted]
        bias_N = None if self.bias_N is None else self.bias_N[wanted]
        return replace(self, bits_NB=self.bits_NB[wanted], scales_N=scales_N, bias_N=bias_N)

    def signs(self) -> Tensor:
        """Returns 1 or -1 for each weight, fp32 [N, K]."""
        places = torch.arange(8, device=self.bits_NB.device, dtype=torch.uint8)
        bits_NK = (self.bits_NB[:, :, None] >> places) & 1
        return bits_NK.flatten(1)[:, : self.num_columns].float() * 2.0 - 1.0

    def dense(self) -> Tensor:
        """Returns the addition, fp32 [N, K]."""
        return self.signs() * self.every_scale()[:, None]


def signs_of(delta_NK: Tensor) -> Tensor:
    """Returns the bits [N, B] of a difference of weights. A difference of zero counts as positive,
    as in published files."""
    padded_NK = F.pad((delta_NK >= 0).to(torch.uint8), (0, -delta_NK.shape[1] % 8))
    places = torch.arange(8, device=delta_NK.device, dtype=torch.uint8)
    shifted_NB8: Tensor = padded_NK.unflatten(1, (-1, 8)) << places
    return shifted_NB8.sum(dim=2, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedExpert:
    """The additions to one expert's matrices; None: a matrix is the base model's."""

    gate: SignMatrix | None = None
    up: SignMatrix | None = None
    down: SignMatrix | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = (self.gate, self.up, self.down)
        return sum(0 if matrix is None else matrix.nbytes for matrix in parts)
