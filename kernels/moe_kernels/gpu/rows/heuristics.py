"""Chooses the layout of a row from its width only, so that its sums do not depend on other rows."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WIDTH = 32768  # a row is held in registers: at most 64 values in each of 512 threads
_VALUES_PER_WARP = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RowConfig:
    """A program holds one row in a block of `block` places, a power of two."""

    block: int
    num_warps: int


def row_config(width: int) -> RowConfig:
    """16 values per thread, within 1 to 16 warps."""
    assert 0 < width <= MAX_WIDTH, f"a row of {width} values, over {MAX_WIDTH}"
    block = 1 << (width - 1).bit_length()
    return RowConfig(block=block, num_warps=min(16, max(1, block // _VALUES_PER_WARP)))
