"""Tiles of the grouped products, from shapes alone.

    S slots (rows times choices), E experts, M slots of a tile, C inputs, N outputs

One product's sum is the same whatever the tile: in every tile size the weights are the left
operand, BLOCK_C depends on the format alone, and one accumulator takes the blocks in ascending
order. Whether the instructions that the compiler picks for the three sizes round alike as well is
up to the chip; `has_equal_tiles` in api.py asks it. Where they do, the size follows the number of
slots; where they do not, it is `FIXED_BLOCK_M` for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal[
    "plain", "int8", "int8_zero", "fp8_channel", "fp8_block", "int4", "int4_zero", "mxfp4"
]
PACKED_FORMATS: tuple[WeightFormat, ...] = ("int4", "int4_zero", "mxfp4")

BLOCK_MS = (16, 64, 128)
# Still bound by the weights' bytes at few rows (64 operations a byte; an H200 has 206), and large
# enough that many rows do not read the weights too often.
FIXED_BLOCK_M = 64
FP8_BLOCK = 128  # the side of a block with one scale
_GROUP_M = 8
_NARROW = 64  # outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """One grouped product. `group`: inputs that share a scale; 0 where a scale has all of them."""

    num_inputs: int
    num_outputs: int
    is_gated: bool
    weight_format: WeightFormat = "plain"
    group: int = 0
    item_bytes: int = 2  # of the inputs

    @property
    def block_c(self) -> int:
        """Inputs of one step: 128 bytes of a row, and what one scale covers in a packed half."""
        return block_inputs(self.weight_format, self.group, self.item_bytes)

    @property
    def can_use_tma(self) -> bool:
        """TMA wants rows of whole 16 bytes, and weights that need no conversion."""
        return self.weight_format == "plain" and self.num_inputs * self.item_bytes % 16 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """The constants that a product is compiled with. `uses_tma`: the persistent kernel."""

    block_m: int
    block_n: int
    block_c: int
    group_m: int
    num_warps: int
    num_stages: int
    uses_tma: bool


def block_inputs(weight_format: WeightFormat, group: int, item_bytes: int = 2) -> int:
    """BLOCK_C of a format. Packed formats: twice the inputs of a half, which lie in one group."""
    if weight_format in PACKED_FORMATS:
        return 2 * min(group, 64)
    if weight_format == "int8_zero":
        return min(group, 64)
    if weight_format == "plain":
        return 128 // item_bytes
    return 128


def choose_block_m(num_slots: int, num_experts: int, has_equal_tiles: bool) -> int:
    """Slots of a tile: the first size that holds an expert's share of the slots.

    `has_equal_tiles`: the chip was found to give the same bits in all sizes.
    """
    if not has_equal_tiles:
        return FIXED_BLOCK_M
    for block_m in BLOCK_MS:
        if num_slots <= block_m * num_experts:
            return block_m
    return BLOCK_MS[-1]


def choose_tile(block_m: int, shape: ProductShape, capability: int) -> TileConfig:
    """Returns the tile of a product; `capability` is 80, 90 or 100: the chip's times ten."""
    assert block_m in BLOCK_MS, f"no configuration for tiles of {block_m} slots"
    # A router's few outputs want no wide tiles; fp32, without matrix instructions, has no registers
    # for them.
    is_narrow = shape.num_outputs <= _NARROW or shape.item_bytes > 2
    if block_m == BLOCK_MS[-1] and shape.can_use_tma and capability >= 90 and not is_narrow:
        return _tile(shape, block_m, 128 if shape.is_gated else 256, 8, 3, uses_tma=True)
    if capability < 90 and shape.weight_format != "plain":
        # Without wgmma, conversions of more outputs do not fit the registers beside the sums.
        # Nor do three stages of four bits with zeros on few warps.
        has_zeros = shape.weight_format == "int4_zero" and block_m > BLOCK_MS[0]
        block_n = 32 if shape.is_gated else 64
        num_warps = 8 if has_zeros or block_m == BLOCK_MS[-1] else 4
        return _tile(shape, block_m, block_n, num_warps, 2 if has_zeros else 3)
    is_packed = shape.weight_format in PACKED_FORMATS
    if block_m == 16 and capability >= 100 and is_packed and not shape.is_gated:
        return _tile(shape, block_m, 128, 8, 4)  # 64 outputs on 4 warps spill there
    if block_m == 16:
        # Many small programs: what counts is bytes under way.
        return _tile(shape, block_m, 64, 4, 4)
    block_n = 64 if shape.is_gated or is_narrow else 128
    return _tile(shape, block_m, block_n, 8, 3)


def _tile(
    shape: ProductShape,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    uses_tma: bool = False,
) -> TileConfig:
    return TileConfig(
        block_m=block_m,
        block_n=block_n,
        block_c=shape.block_c,
        group_m=_GROUP_M,
        num_warps=num_warps,
        num_stages=num_stages,
        uses_tma=uses_tma,
    )
