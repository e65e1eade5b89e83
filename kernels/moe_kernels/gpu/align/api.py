"""Groups rows by expert for the grouped GEMM: allocates the outputs and launches the kernels.

S slots (rows times choices), E experts, C chunks, R rows of a tile. Nothing waits for the device:
all sizes are upper bounds that the host knows, so the calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.gpu.align.heuristics import AlignConfig, choose_align
from moe_kernels.gpu.align.kernel import (
    align_kernel,
    count_kernel,
    map_kernel,
    place_kernel,
    scan_kernel,
)

SCAN_CHUNKS, SCAN_EXPERTS, MAP_TILES = 64, 16, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Tiles of `block_rows` slots of one expert, filled by `align`; int32 on the ids' device.

    Direct (the last four are None): tile s holds slot s alone, in its first row, and
    `tile_experts` are the ids themselves, in their dtype.
    """

    block_rows: int
    max_tiles: int
    num_slots: int
    tile_experts: Tensor  # [max_tiles]; not an expert where the tile is unused
    sorted_slots: Tensor | None  # [max_tiles * R]; S where a tile is padded
    num_tiles: Tensor | None  # [1]
    counts_E: Tensor | None
    tile_starts_E: Tensor | None

    @property
    def is_direct(self) -> bool:
        return self.sorted_slots is None


def align(expert_ids_TK: Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Groups the slots by expert, ascending within one. Ids outside [0, E) take no part.

    Worked example, E = 4, R = 2, ids [[0, 2], [1, 2], [2, 9]], S = 6: counts [1, 1, 3, 0], tiles
    of experts [0, 1, 2, 2, -1], sorted slots [0 6 | 2 6 | 1 3 | 4 6 | unused].
    """
    assert expert_ids_TK.is_contiguous(), "expert ids must be contiguous"
    assert block_rows & (block_rows - 1) == 0, f"tile of {block_rows} rows: not a power of two"
    ids_S = expert_ids_TK.view(-1)
    config = choose_align(len(ids_S), num_experts, block_rows)
    if config.is_direct:
        return _direct(ids_S, config)

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=ids_S.device)

    alignment = Alignment(
        block_rows=block_rows,
        max_tiles=config.max_tiles,
        num_slots=len(ids_S),
        tile_experts=empty(config.max_tiles),
        sorted_slots=empty(config.max_tiles * block_rows),
        num_tiles=empty(1),
        counts_E=empty(num_experts),
        tile_starts_E=empty(num_experts),
    )
    if config.num_chunks:
        _align_chunks(ids_S, num_experts, alignment, config, empty(config.num_chunks, num_experts))
    else:
        align_kernel[(num_experts + 1,)](
            ids_S,
            alignment.sorted_slots,
            alignment.tile_experts,
            alignment.counts_E,
            alignment.tile_starts_E,
            alignment.num_tiles,
            len(ids_S),
            num_experts,
            config.max_tiles,
            BLOCK_ROWS=block_rows,
            BLOCK_SLOTS=config.block_slots,
            BLOCK_EXPERTS=config.block_experts,
        )
    return alignment


def _direct(ids_S: Tensor, config: AlignConfig) -> Alignment:
    return Alignment(
        block_rows=config.block_rows,
        max_tiles=config.max_tiles,
        num_slots=len(ids_S),
        tile_experts=ids_S,
        sorted_slots=None,
        num_tiles=None,
        counts_E=None,
        tile_starts_E=None,
    )


def _align_chunks(
    ids_S: Tensor, num_experts: int, out: Alignment, config: AlignConfig, starts_CE: Tensor
) -> None:
    """Counts each chunk, adds up the chunks, maps tiles to experts, and places the slots."""
    num_slots, chunks = out.num_slots, (config.num_chunks,)
    bins = config.block_experts
    count_kernel[chunks](
        ids_S, starts_CE, num_slots, num_experts, CHUNK=config.chunk, BLOCK_EXPERTS=bins
    )
    scan_kernel[(-(-num_experts // SCAN_EXPERTS),)](
        starts_CE,
        out.counts_E,
        config.num_chunks,
        num_experts,
        BLOCK_CHUNKS=SCAN_CHUNKS,
        BLOCK_EXPERTS=SCAN_EXPERTS,
    )
    map_kernel[(-(-config.max_tiles // MAP_TILES),)](
        out.counts_E,
        out.sorted_slots,
        out.tile_experts,
        out.tile_starts_E,
        out.num_tiles,
        num_slots,
        num_experts,
        config.max_tiles,
        BLOCK_ROWS=config.block_rows,
        BLOCK_TILES=MAP_TILES,
        BLOCK_EXPERTS=bins,
    )
    place_kernel[chunks](
        ids_S,
        starts_CE,
        out.tile_starts_E,
        out.sorted_slots,
        num_slots,
        num_experts,
        CHUNK=config.chunk,
        BLOCK_ROWS=config.block_rows,
    )
