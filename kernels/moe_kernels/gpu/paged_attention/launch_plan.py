"""A step's attention as a few int32 tensors in one buffer: made on the host, copied once.

A tile is up to `tile_tokens` query tokens of one sequence; an item is a tile and one split of its
keys. Short sequences of queries (decode) become items, long ones (prefill) whole tiles:

    sequence 0: token 517 of 518     tile (sequence 0, first token 0, 1 token, position 517)
                                     items (tile 0, split 0) (tile 0, split 1) (tile 0, split 2)
    sequence 1: tokens 0..99         13 tiles of 8 tokens, those with most keys first

Items are cut into slabs, so that their partial results fit into a bounded workspace. With `sizes`
the buffer is padded: tiles of 0 tokens and items of tile -1 do nothing. Then the same launches
serve any step that fits, which is what a CUDA graph needs (`PagedPlan.update`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.gpu.paged_attention.heuristics import AttentionConfig
from moe_kernels.interface.attention_shape import AttentionShape, DecodeRoom, StepRows

TILE_FIELDS = 6  # sequence, first token, tokens, first position; of items: first item, items
ITEM_FIELDS = 2  # tile, split
MAX_PARTIAL_BYTES = 512 * 2**20

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSizes:
    """The capacity of the buffer and of the launches.

    `item_tile_tokens` is the most tokens of a tile that is cut into items.
    """

    num_sequences: int
    table_width: int
    num_item_tiles: int
    num_items: int
    item_tile_tokens: int
    num_tiles: int

    def fits(self, room: PlanSizes) -> bool:
        return all(getattr(self, name) <= getattr(room, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Slab:
    """Tiles and items of one launch; the tiles' first items are counted from the slab's."""

    first_tile: int
    num_tiles: int
    first_item: int
    num_items: int


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """S sequences, W pages of the widest table, N tiles cut into items, I items, M whole tiles.

    Implements FixedAttention, if it was made with `sizes`.
    """

    buffer: Tensor  # int32, on the device: what the others are views of
    tables_SW: Tensor
    item_tiles_N: Tensor  # [N, TILE_FIELDS]
    items_I: Tensor  # [I, ITEM_FIELDS]
    tiles_M: Tensor  # [M, TILE_FIELDS]
    slabs: tuple[Slab, ...]
    sizes: PlanSizes
    config: AttentionConfig
    shape: AttentionShape
    page_size: int

    @property
    def plan(self) -> PagedPlan:
        return self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.buffer,)

    def pack(self, step: StepRows) -> Tensor:
        """Plans another step, on the host; it must fit in `sizes`, as one slab."""
        assert step.page_size == self.page_size, f"pages of {step.page_size} tokens"
        layout = _lay_out(step, self.shape, self.config)
        _check_one_slab(self.slabs)
        _check_one_slab(layout.slabs)
        return _packed(layout, step, self.sizes, self.buffer.device)

    def load(self, packed: Tensor) -> None:
        """Lets the buffer be what `pack` gave."""
        self.buffer.copy_(packed, non_blocking=True)

    def update(self, step: StepRows) -> None:
        """Plans another step in the same buffer."""
        self.load(self.pack(step))


@dataclass(frozen=True, slots=True)
class _Layout:
    """The step's rows of each table, unpadded."""

    item_tiles: Ints
    items: Ints
    tiles: Ints
    slabs: tuple[Slab, ...]
    sizes: PlanSizes


def plan_paged_attention(
    step: StepRows,
    shape: AttentionShape,
    config: AttentionConfig,
    device: torch.device,
    sizes: PlanSizes | None = None,
) -> PagedPlan:
    """Plans a step, in a buffer of the given sizes or of the step's own. Does not wait for a
    device.

    Page 0 is the empty page and stands for "none" in the tables.
    """
    layout = _lay_out(step, shape, config)
    slabs = layout.slabs
    if sizes is not None:
        _check_one_slab(slabs)
        slabs = (Slab(0, sizes.num_item_tiles, 0, sizes.num_items),) if sizes.num_items else ()
    sizes = sizes or layout.sizes
    buffer = _packed(layout, step, sizes, device).to(device, non_blocking=True)
    starts = np.cumsum([0, *_section_sizes(sizes)]).tolist()
    return PagedPlan(
        buffer=buffer,
        tables_SW=_view(buffer, starts[0], sizes.num_sequences, sizes.table_width),
        item_tiles_N=_view(buffer, starts[1], sizes.num_item_tiles, TILE_FIELDS),
        items_I=_view(buffer, starts[2], sizes.num_items, ITEM_FIELDS),
        tiles_M=_view(buffer, starts[3], sizes.num_tiles, TILE_FIELDS),
        slabs=slabs,
        sizes=sizes,
        config=config,
        shape=shape,
        page_size=step.page_size,
    )


def plan_sizes(step: StepRows, shape: AttentionShape, config: AttentionConfig) -> PlanSizes:
    """Computes the sizes that the step needs; a graph's bucket has those of its largest step."""
    return _lay_out(step, shape, config).sizes


def decode_sizes(
    room: DecodeRoom, shape: AttentionShape, config: AttentionConfig
) -> PlanSizes | None:
    """Computes sizes that fit any step of the room; None if its items need more than one slab.

    Rows of a sequence each, with n keys in all, have at most n / split + one split begun per row;
    and no row has more splits than the longest one, or than its window or chunk may touch.
    """
    rows, split = room.size.num_rows, config.split_tokens
    most = -(-room.max_positions // split)
    for reach in (shape.sliding_window, shape.chunk):
        if reach is not None:
            most = min(most, (reach - 1) // split + 2)
    num_items = min(rows * most, (room.size.num_keys + rows * (split - 1)) // split)
    if num_items > _max_items(1, shape, config):
        return None
    pages_per_split = split // room.page_size
    num_pages = -(-room.max_positions // room.page_size)
    return PlanSizes(
        num_sequences=rows,
        table_width=-(-num_pages // pages_per_split) * pages_per_split,
        num_item_tiles=rows,
        num_items=num_items,
        item_tile_tokens=1,
        num_tiles=0,
    )


def partial_rows(sizes: PlanSizes, config: AttentionConfig) -> int:
    """Returns the rows that one program of the items leaves in the workspace."""
    return sizes.item_tile_tokens * config.items.block_heads


def _check_one_slab(slabs: tuple[Slab, ...]) -> None:
    assert len(slabs) <= 1, f"a fixed plan has one slab, not {len(slabs)}: cut the step's prompts"


def _view(buffer: Tensor, start: int, num_rows: int, width: int) -> Tensor:
    return buffer[start : start + num_rows * width].view(num_rows, width)


def _section_sizes(sizes: PlanSizes) -> tuple[int, ...]:
    """Numbers in each part of the buffer; parts start at multiples of 16 bytes."""
    numbers = (
        sizes.num_sequences * sizes.table_width,
        sizes.num_item_tiles * TILE_FIELDS,
        sizes.num_items * ITEM_FIELDS,
        sizes.num_tiles * TILE_FIELDS,
    )
    return tuple(-(-number // 4) * 4 for number in numbers)


def _packed(layout: _Layout, step: StepRows, sizes: PlanSizes, device: torch.device) -> Tensor:
    """The whole buffer on the host; pinned where the device reads it from there."""
    assert layout.sizes.fits(sizes), f"a step of {layout.sizes} does not fit in {sizes}"
    sections = _section_sizes(sizes)
    packed = torch.zeros(sum(sections), dtype=torch.int32, pin_memory=device.type == "cuda")
    tables, item_tiles, items, tiles = (part.numpy() for part in packed.split(sections))
    for row, pages in enumerate(step.page_tables):
        start = row * sizes.table_width
        tables[start : start + len(pages)] = pages
    items[0::ITEM_FIELDS] = -1
    for section, rows in ((item_tiles, layout.item_tiles), (items, layout.items)):
        section[: rows.size] = rows.reshape(-1)
    tiles[: layout.tiles.size] = layout.tiles.reshape(-1)
    return packed


def _lay_out(step: StepRows, shape: AttentionShape, config: AttentionConfig) -> _Layout:
    lens = step.query_lens
    is_items = lens <= (config.max_item_tokens if config.tiles else lens)
    item_tiles = _cut(step, np.flatnonzero(is_items), config.items.tile_tokens)
    whole = np.empty((0, TILE_FIELDS), dtype=np.int64)
    if config.tiles is not None:
        whole = _cut(step, np.flatnonzero(~is_items), config.tiles.tile_tokens)
        whole = whole[np.argsort(-_num_keys(whole, shape), kind="stable")]
    first = _first_visible(item_tiles[:, 3], shape) // config.split_tokens
    last = (item_tiles[:, 3] + item_tiles[:, 2] - 1) // config.split_tokens
    num_items = last - first + 1
    tile_tokens = int(item_tiles[:, 2].max(initial=0))
    slabs = _slabs(num_items, _max_items(tile_tokens, shape, config))
    slab_of_tile = np.repeat(np.arange(len(slabs)), [slab.num_tiles for slab in slabs])
    slab_tile = np.array([slab.first_tile for slab in slabs], dtype=np.int64)[slab_of_tile]
    slab_item = np.array([slab.first_item for slab in slabs], dtype=np.int64)[slab_of_tile]
    item_start = np.cumsum(num_items) - num_items
    item_tiles[:, 4], item_tiles[:, 5] = item_start - slab_item, num_items
    tile_of_item = np.repeat(np.arange(len(num_items)), num_items)
    split = np.arange(len(tile_of_item)) - (item_start - first)[tile_of_item]
    longest = max((len(table) for table in step.page_tables), default=0)
    assert config.split_tokens % step.page_size == 0, f"pages of {step.page_size} tokens"
    pages_per_split = config.split_tokens // step.page_size
    sizes = PlanSizes(
        num_sequences=len(lens),
        table_width=-(-longest // pages_per_split) * pages_per_split,
        num_item_tiles=len(item_tiles),
        num_items=len(split),
        item_tile_tokens=tile_tokens,
        num_tiles=len(whole),
    )
    items = np.stack((tile_of_item - slab_tile[tile_of_item], split), axis=1)
    return _Layout(item_tiles, items, whole, slabs, sizes)


def _cut(step: StepRows, chosen: Ints, tile_tokens: int) -> Ints:
    """Tiles of the chosen sequences, [N, TILE_FIELDS]."""
    lens = step.query_lens
    counts = -(-lens[chosen] // tile_tokens)
    sequence = np.repeat(chosen, counts)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * tile_tokens
    tiles = np.zeros((len(sequence), TILE_FIELDS), dtype=np.int64)
    tiles[:, 0] = sequence
    tiles[:, 1] = (np.cumsum(lens) - lens)[sequence] + first
    tiles[:, 2] = np.minimum(lens[sequence] - first, tile_tokens)
    tiles[:, 3] = step.query_starts[sequence] + first
    return tiles


def _first_visible(positions: Ints, shape: AttentionShape) -> Ints:
    """Computes the same as `_first_visible` in kernel.py."""
    first = np.zeros_like(positions)
    if shape.sliding_window is not None:
        first = np.maximum(first, positions - (shape.sliding_window - 1))
    if shape.chunk is not None:
        first = np.maximum(first, positions // shape.chunk * shape.chunk)
    return first


def _num_keys(tiles: Ints, shape: AttentionShape) -> Ints:
    keys: Ints = tiles[:, 3] + tiles[:, 2] - _first_visible(tiles[:, 3], shape)
    return keys


def _max_items(tile_tokens: int, shape: AttentionShape, config: AttentionConfig) -> int:
    rows = tile_tokens * config.items.block_heads * shape.num_kv_heads * config.head_blocks
    return int(max(1, MAX_PARTIAL_BYTES // max(1, rows * (shape.value_width + 2) * 4)))


def _slabs(num_items: Ints, limit: int) -> tuple[Slab, ...]:
    """Runs of tiles with at most `limit` items each; a single tile may have more."""
    ends = np.cumsum(num_items)
    slabs: list[Slab] = []
    tile = item = 0
    while tile < len(num_items):
        end = max(tile + 1, int(np.searchsorted(ends, item + limit, side="right")))
        slabs.append(Slab(tile, end - tile, item, int(ends[end - 1]) - item))
        tile, item = end, int(ends[end - 1])
    return tuple(slabs)
