"""The alignment equals that of plain torch exactly, and stays within its bounds."""

from __future__ import annotations

import pytest
import torch

from moe_kernels.gpu.align import heuristics
from moe_kernels.gpu.align.api import Alignment, align
from moe_kernels.gpu.align.heuristics import choose_align, is_direct, max_tiles
from moe_kernels.gpu.align.reference import aligned_tiles
from tests.support.kernels.kernel_sets import ROUTINGS, ids_of


def check(found: Alignment, ids: torch.Tensor, num_experts: int) -> None:
    want = aligned_tiles(ids, num_experts, found.block_rows)
    assert found.num_tiles is not None and found.sorted_slots is not None, "not direct"
    num_tiles = int(found.num_tiles)
    assert num_tiles == len(want.experts), f"{num_tiles} tiles, not {len(want.experts)}"
    assert torch.equal(found.tile_experts[:num_tiles], want.experts), "experts of the tiles"
    assert (found.tile_experts[num_tiles:] == -1).all(), "unused tiles have an expert"
    slots = found.sorted_slots.view(-1, found.block_rows)[:num_tiles]
    assert torch.equal(slots, want.slots), f"slots {slots.tolist()}, not {want.slots.tolist()}"
    assert found.counts_E is not None and torch.equal(found.counts_E, want.counts_E), "counts"


@pytest.mark.sampled
@pytest.mark.parametrize("has_chunks", [False, True], ids=["one kernel", "chunks"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "block_rows"),
    [(1, 1, 3, 16), (5, 2, 8, 16), (70, 4, 16, 32), (150, 1, 5, 64), (9, 8, 33, 16)],
)
def test_equals_the_reference(
    num_rows: int,
    top_k: int,
    num_experts: int,
    block_rows: int,
    routing: str,
    has_chunks: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if has_chunks:
        monkeypatch.setattr(heuristics, "_MAX_SLOTS_AT_ONCE", 0)
    ids = ids_of(num_rows, top_k, num_experts, routing).to(device)
    check(align(ids, num_experts, block_rows), ids, num_experts)


def test_the_worked_example(device: torch.device) -> None:
    ids = torch.tensor([[0, 2], [1, 2], [2, 9]], device=device)
    found = align(ids, 4, 2)
    assert found.tile_experts.tolist() == [0, 1, 2, 2, -1], found.tile_experts
    assert found.sorted_slots is not None, "not direct"
    slots = found.sorted_slots[:8].tolist()
    assert slots == [0, 6, 2, 6, 1, 3, 4, 6], slots


def test_few_slots_are_their_own_tiles(device: torch.device) -> None:
    ids = torch.tensor([[3, 7]], device=device)
    found = align(ids, 8, 16)
    assert found.is_direct, "2 slots of 8 experts need no sorting"
    assert found.tile_experts.tolist() == [3, 7], found.tile_experts
    assert not is_direct(3, 8), "3 slots of 8 experts are sorted"


def test_bound_of_tiles_holds_and_is_reached() -> None:
    for num_slots in range(1, 20):
        for num_experts in (1, 2, 5, 30):
            num_active = min(num_slots, num_experts)
            worst = [1] * (num_active - 1) + [num_slots - num_active + 1]
            bound = max_tiles(num_slots, num_experts, 4)
            reached = sum(-(-count // 4) for count in worst)
            assert reached == bound, f"{num_slots} slots, {num_experts} experts: {reached}, {bound}"


def test_many_slots_are_counted_in_chunks() -> None:
    assert choose_align(8192, 128, 128).num_chunks == 0, "one kernel up to 8192 slots"
    config = choose_align(131072, 128, 128)
    assert config.num_chunks == 1024 and config.block_experts == 256, config
