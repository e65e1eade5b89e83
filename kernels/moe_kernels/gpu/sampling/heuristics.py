"""Cuts a vocabulary into blocks by its size only, so that no row depends on another."""

from __future__ import annotations

from dataclasses import dataclass

MAX_VOCABULARY = 2**20
_MOST_BLOCKS = 64
_VALUES_PER_WARP = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """A row is `num_blocks` blocks of `block` tokens, a program each; powers of two but the number.

    At most `capacity` of a row's likeliest tokens are collected for the search of the cut.
    """

    block: int
    num_blocks: int
    block_blocks: int  # the power of two that is not below num_blocks
    num_warps: int
    capacity: int = 4096
    search_warps: int = 16


def sampling_config(vocab_size: int) -> SamplingConfig:
    """Up to 64 blocks: one row alone then still fills half of a card."""
    assert 0 < vocab_size <= MAX_VOCABULARY, f"{vocab_size} tokens, over {MAX_VOCABULARY}"
    block = max(128, _power_of_two(-(-vocab_size // _MOST_BLOCKS)))
    num_blocks = -(-vocab_size // block)
    return SamplingConfig(
        block=block,
        num_blocks=num_blocks,
        block_blocks=_power_of_two(num_blocks),
        num_warps=min(16, max(1, block // _VALUES_PER_WARP)),
    )


def _power_of_two(count: int) -> int:
    """The smallest one that is not below `count`."""
    return 1 << (count - 1).bit_length()
