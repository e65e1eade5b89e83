"""Chooses how many heads of a token one program computes, from the attention's shape only."""

from __future__ import annotations

from dataclasses import dataclass

_VALUES_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A program's block: `block_heads` heads of `block_dim` places, both powers of two."""

    block_heads: int
    block_dim: int
    block_value_dim: int
    num_warps: int = 4


def head_config(num_heads: int, head_dim: int, value_dim: int) -> HeadConfig:
    """About 1024 values per program, and no more heads than there are."""
    block_dim, block_value_dim = _power_of_two(head_dim), _power_of_two(value_dim)
    most = max(1, _VALUES_PER_PROGRAM // max(block_dim, block_value_dim))
    return HeadConfig(
        block_heads=min(most, _power_of_two(num_heads)),
        block_dim=block_dim,
        block_value_dim=block_value_dim,
    )


def _power_of_two(count: int) -> int:
    """The smallest one that is not below `count`."""
    return 1 << (count - 1).bit_length()
