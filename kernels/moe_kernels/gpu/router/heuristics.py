"""Chooses the layout of a row of the router from the router's shape only, never from the rows."""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.interface.routing import RouterShape

MAX_EXPERTS = 1024  # a row is held in the registers of one warp


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """A program's block: `block_groups` groups of `block_size` experts, both powers of two."""

    block_groups: int
    block_size: int
    num_warps: int = 1


def router_config(shape: RouterShape) -> RouterConfig:
    """One warp per row: reductions then need no shared memory, and the rows fill the card."""
    block_groups = _power_of_two(shape.num_groups)
    block_size = _power_of_two(shape.num_experts // shape.num_groups)
    block = block_groups * block_size
    assert block <= 2 * MAX_EXPERTS, f"{shape} needs a block of {block}, over {2 * MAX_EXPERTS}"
    return RouterConfig(block_groups=block_groups, block_size=block_size)


def _power_of_two(count: int) -> int:
    """The smallest one that is not below `count`."""
    return 1 << (count - 1).bit_length()
