"""Sizes and path of the alignment, from what the host knows: slots, experts and the tile.

S slots (rows times choices), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

# A tile for each slot costs padding, never a kernel: worth it while experts seldom repeat.
_EXPERTS_PER_SLOT = 4
# One program per expert reads all slots; beyond this many, chunks are counted side by side.
_MAX_SLOTS_AT_ONCE = 8192
_CHUNK = 128
_BLOCK_SLOTS = 1024  # of one load, however few there are: another size would be another kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignConfig:
    """The sizes of an alignment. `num_chunks` is 0 if one kernel does everything. Blocks are powers
    of two."""

    block_rows: int
    max_tiles: int
    is_direct: bool
    num_chunks: int
    chunk: int
    block_slots: int
    block_experts: int


def max_tiles(num_slots: int, num_experts: int, block_rows: int) -> int:
    """Returns the largest number of tiles that a routing of the slots may need: sum over experts of
    ceil(count / rows).

    With A = min(S, E) experts in use the sum is largest, (S - A) // rows + A. Example: 10 slots, 3
    experts, tiles of 4: (10 - 3) // 4 + 3 = 4, as for the counts 1, 4, 5 (1 + 1 + 2).
    """
    num_active = min(num_slots, num_experts)
    return (num_slots - num_active) // block_rows + num_active


def is_direct(num_slots: int, num_experts: int) -> bool:
    """Decides if each slot gets a tile of its own, so that nothing is sorted."""
    return num_slots * _EXPERTS_PER_SLOT <= num_experts


def choose_align(num_slots: int, num_experts: int, block_rows: int) -> AlignConfig:
    """Returns the configuration for S slots over E experts in tiles of `block_rows`."""
    direct = is_direct(num_slots, num_experts)
    has_chunks = not direct and num_slots > _MAX_SLOTS_AT_ONCE
    return AlignConfig(
        block_rows=block_rows,
        max_tiles=num_slots if direct else max_tiles(num_slots, num_experts, block_rows),
        is_direct=direct,
        num_chunks=-(-num_slots // _CHUNK) if has_chunks else 0,
        chunk=_CHUNK,
        block_slots=_BLOCK_SLOTS,
        # One bin more than experts: for slots without an expert here.
        block_experts=max(16, _power_of_two(num_experts + 1)),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
