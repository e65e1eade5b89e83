"""Slots sorted by expert into tiles of one expert each. Integers only, no atomics between programs.

S slots (rows times choices), E experts, C chunks of slots, R rows of a tile. Slots whose id is not
in [0, E) belong to no tile. Padding in a tile is the slot number S. Within an expert, slots ascend.
"""

import triton
import triton.language as tl


@triton.jit
def _bins(ids, num_experts, BLOCK_EXPERTS: tl.constexpr):
    """Returns the expert of each slot, or the last bin for slots without an expert."""
    return tl.where((ids >= 0) & (ids < num_experts), ids, BLOCK_EXPERTS - 1)


@triton.jit(do_not_specialize=["num_slots", "max_tiles"])
def align_kernel(
    ids_ptr,
    sorted_slots_ptr,
    tile_experts_ptr,
    counts_ptr,
    tile_starts_ptr,
    num_tiles_ptr,
    num_slots,
    num_experts,
    max_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """All in one kernel, grid (E + 1): program e counts all experts and places its own slots.

    ids [S]; sorted_slots [max_tiles * R], tile_experts [max_tiles] (-1 where unused), counts [E],
    tile_starts [E], num_tiles [1]. Program E writes what lies behind the last tile. A slot's place
    is its expert's first tile plus the number of equal ids before it: the order is fixed.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SLOTS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    totals = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for start in range(0, num_slots, BLOCK_SLOTS):
        slots = start + lanes
        ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int32)
        totals += tl.histogram(_bins(ids, num_experts, BLOCK_EXPERTS), BLOCK_EXPERTS)
    totals = tl.where(experts < num_experts, totals, 0)
    tiles = (totals + BLOCK_ROWS - 1) // BLOCK_ROWS
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0))
    if expert == num_experts:
        tl.store(num_tiles_ptr, first_tile)
        for start in range(first_tile, max_tiles, BLOCK_SLOTS):
            unused = start + lanes
            tl.store(tile_experts_ptr + unused, -1, mask=unused < max_tiles)
    else:
        count = tl.sum(tl.where(experts == expert, totals, 0))
        num_own = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
        tl.store(counts_ptr + expert, count)
        tl.store(tile_starts_ptr + expert, first_tile)
        for start in range(0, num_own, BLOCK_SLOTS):
            own = start + lanes
            tl.store(tile_experts_ptr + first_tile + own, expert, mask=own < num_own)
        place = first_tile * BLOCK_ROWS
        padding = count + tl.arange(0, BLOCK_ROWS)
        tl.store(sorted_slots_ptr + place + padding, num_slots, mask=padding < num_own * BLOCK_ROWS)
        for start in range(0, num_slots, BLOCK_SLOTS):
            slots = start + lanes
            ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int32)
            is_own = (ids == expert).to(tl.int32)
            rank = tl.cumsum(is_own, 0) - 1
            tl.store(sorted_slots_ptr + place + rank, slots, mask=is_own != 0)
            place += tl.sum(is_own)


@triton.jit(do_not_specialize=["num_slots"])
def count_kernel(
    ids_ptr,
    chunk_counts_ptr,
    num_slots,
    num_experts,
    CHUNK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Grid (C): program c counts the experts of its chunk. ids [S] -> chunk_counts [C, E]."""
    chunk = tl.program_id(0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = tl.arange(0, BLOCK_EXPERTS)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int32)
    counts = tl.histogram(_bins(ids, num_experts, BLOCK_EXPERTS), BLOCK_EXPERTS)
    row_ptr = chunk_counts_ptr + chunk * num_experts
    tl.store(row_ptr + experts, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(
    chunk_counts_ptr,
    counts_ptr,
    num_chunks,
    num_experts,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Grid (ceil(E / BLOCK_EXPERTS)): in each column, counts [C, E] become the sums before them.

    Also writes the columns' sums, counts [E].
    """
    experts = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    carry = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for start in range(0, num_chunks, BLOCK_CHUNKS):
        chunks = start + tl.arange(0, BLOCK_CHUNKS)
        mask = (chunks < num_chunks)[:, None] & (experts < num_experts)[None, :]
        tile_ptr = chunk_counts_ptr + chunks[:, None] * num_experts + experts[None, :]
        counts = tl.load(tile_ptr, mask=mask, other=0)
        before = tl.cumsum(counts, 0) - counts + carry[None, :]
        tl.store(tile_ptr, before, mask=mask)
        carry += tl.sum(counts, 0)
    tl.store(counts_ptr + experts, carry, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_slots", "max_tiles"])
def map_kernel(
    counts_ptr,
    sorted_slots_ptr,
    tile_experts_ptr,
    tile_starts_ptr,
    num_tiles_ptr,
    num_slots,
    num_experts,
    max_tiles,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Grid (ceil(max_tiles / BLOCK_TILES)): the expert of each tile, and the padding of each tile.

    counts [E] -> tile_experts [max_tiles], tile_starts [E], num_tiles [1], and the entries of
    sorted_slots [max_tiles * R] behind each expert's last slot.
    """
    experts = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    ends = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles)
    if tl.program_id(0) == 0:
        tl.store(tile_starts_ptr + experts, ends - tiles, mask=experts < num_experts)
        tl.store(num_tiles_ptr, num_tiles)
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    is_used = tile < num_tiles
    # Experts whose tiles end at or before this one; a used tile's own expert is the next.
    expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    tl.store(tile_experts_ptr + tile, tl.where(is_used, expert, -1), mask=tile < max_tiles)
    is_expert = expert[:, None] == experts[None, :]
    first = tl.sum(tl.where(is_expert, (ends - tiles)[None, :], 0), 1)
    count = tl.sum(tl.where(is_expert, counts[None, :], 0), 1)
    lanes = tl.arange(0, BLOCK_ROWS)
    rank = ((tile - first) * BLOCK_ROWS)[:, None] + lanes[None, :]
    is_padding = is_used[:, None] & (rank >= count[:, None])
    place = (tile * BLOCK_ROWS)[:, None] + lanes[None, :]
    tl.store(sorted_slots_ptr + place, num_slots, mask=is_padding)


@triton.jit(do_not_specialize=["num_slots"])
def place_kernel(
    ids_ptr,
    chunk_starts_ptr,
    tile_starts_ptr,
    sorted_slots_ptr,
    num_slots,
    num_experts,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Grid (C): program c writes the slots of its chunk to their places in sorted_slots.

    Place = first tile of the expert, plus equal ids in earlier chunks (chunk_starts [C, E]), plus
    equal ids before it in the chunk.
    """
    chunk = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    slots = chunk * CHUNK + lanes
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1).to(tl.int32)
    is_here = (ids >= 0) & (ids < num_experts)
    is_equal_before = (ids[:, None] == ids[None, :]) & (lanes[None, :] < lanes[:, None])
    rank = tl.sum(is_equal_before.to(tl.int32), 1)
    before = tl.load(chunk_starts_ptr + chunk * num_experts + ids, mask=is_here, other=0)
    first = tl.load(tile_starts_ptr + ids, mask=is_here, other=0)
    tl.store(sorted_slots_ptr + first * BLOCK_ROWS + before + rank, slots, mask=is_here)
