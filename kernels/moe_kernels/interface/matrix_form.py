"""Describes a weight matrix of few bits without its weights, to ask a set if it supports it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# int4 and int8 are whole numbers, e4m3 floats of 8 bits, e2m1 floats of 4 bits.
ValueFormat = Literal["int4", "int8", "e4m3", "e2m1"]

_BITS: dict[ValueFormat, int] = {"int4": 4, "int8": 8, "e4m3": 8, "e2m1": 4}
_ZERO_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixForm:
    """A matrix of N outputs and K inputs as it is stored.

    `group`: neighbouring inputs that share a scale, the last ones may be fewer; 0: all do.
    `block_rows`: neighbouring outputs that share their scales; 1: none do, 0: all do.
    `scale_bits`: of a scale. `is_shuffled`: a group's inputs are not neighbours (activation
    order). `is_transposed`: the checkpoint's tensor of this name is [K, N].
    """

    values: ValueFormat
    scale_bits: int
    group: int = 0
    block_rows: int = 1
    has_zeros: bool = False
    is_shuffled: bool = False
    is_transposed: bool = False

    @property
    def name(self) -> str:
        """For messages: "int4 groups of 128 with zeros"."""
        sharing = "rows" if self.block_rows == 1 else "matrices"
        if self.group:
            sharing = f"groups of {self.group}"
            if self.block_rows > 1:
                sharing = f"blocks of {self.block_rows}x{self.group}"
        zeros = " with zeros" if self.has_zeros else ""
        return f"{self.values} {sharing}{zeros}"

    def transposed(self) -> MatrixForm | None:
        """The form of the transposed matrix; None if transposing would need repacking.

        Blocks are turned over too, and rows with a scale each would be columns with one.
        """
        is_row_scaled = self.block_rows == 1
        if self.value_bits != 8 or self.has_zeros or self.is_shuffled or is_row_scaled:
            return None
        return replace(
            self,
            group=self.block_rows,
            block_rows=self.group,
            is_transposed=not self.is_transposed,
        )

    @property
    def value_bits(self) -> int:
        return _BITS[self.values]

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of a scale and of a zero of eight bits."""
        if not self.group or not self.block_rows:
            return float(self.value_bits)
        shared_bits = self.scale_bits + (_ZERO_BITS if self.has_zeros else 0)
        return self.value_bits + shared_bits / (self.group * self.block_rows)


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A set's storage for matrices of a form: its name, and the bits of a weight."""

    name: str
    bits: float
