"""Tiles of products with signs. The size of a tile never depends on the batch, so a row has the
same bits in every batch, whatever the chip."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_M = 16  # slots; adapters have few rows in a step, and signs are a sixteenth of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SignTile:
    """The constants that a product is compiled with."""

    block_n: int = 64  # what wgmma wants
    block_c: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3


def sign_tile(item_bytes: int) -> SignTile:
    """Returns the tile for inputs of this size: a step takes 128 bytes of a row."""
    return SignTile(block_c=128 // item_bytes)
