"""Slots of the memory that ranks share: a copy is whole, and no slot is taken while a rank uses
it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.shared_memory import SharedMemory
from moe_serve.cache.tiers.arena import ArenaIndex, ArenaView
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.errors import ConfigError
from moe_serve.model.stage.tensor_shard import TensorShard

SPEC = ServedCheckpoint.read(ModelConfig()).spec
HEADS = SPEC.attention.num_kv_heads


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache(SPEC, 6, 16, torch.bfloat16, torch.device("cpu"))
    for part in cache.parts:
        part.copy_(torch.randn(part.shape))
    return cache


@pytest.fixture
def arena(cache: KVCache) -> Iterator[SharedMemory]:
    memory = SharedMemory(WirePages(cache, HEADS).num_bytes * 4 + 100, "a test")
    yield memory
    memory.close()


def test_ranks_with_other_numbers_of_shards_read_a_slot(
    cache: KVCache, arena: SharedMemory
) -> None:
    """Two shards with half of the heads each, and one process with all."""
    whole = ArenaView(arena.path, WirePages(cache, HEADS))
    halves = [
        KVCache(TensorShard(index, 2).spec(SPEC), 6, 16, torch.bfloat16, torch.device("cpu"))
        for index in range(2)
    ]
    views = [
        ArenaView(arena.path, WirePages(half, HEADS, shard, 2)) for shard, half in enumerate(halves)
    ]
    whole.save([(1, 3), (2, 0)])
    for view in views:
        view.load([(3, 5), (0, 4)])
        view.save([(5, 1)])
    whole.load([(1, 3)])
    num = HEADS // 2
    for number, part in enumerate(cache.parts):
        assert torch.equal(part[3], part[1])
        for shard, half in enumerate(halves):
            assert torch.equal(half.parts[number][4], part[2][shard * num : (shard + 1) * num])


def test_memory_that_cannot_be_opened_is_told(cache: KVCache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be opened .* same host"):
        ArenaView(str(tmp_path / "nothing"), WirePages(cache, HEADS))


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="give at least 400"):
        ArenaIndex(399, 100)


def test_the_longest_unused_page_goes_first() -> None:
    index = ArenaIndex(400, 100)
    keys = [bytes([number]) for number in range(6)]
    for key in keys[:4]:
        slot = index.reserve()
        assert slot is not None and index.find([key]) == []
        index.enter(key, slot)
    first = index.find(keys[:1])
    slot = index.reserve()  # the second page's
    assert slot is not None and index.find(keys[1:2]) == [] and index.find(keys[:1]) == first
    index.give_back(slot)
    index.check_integrity()


ORDERS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60)


@given(ORDERS)
def test_a_slot_in_use_is_never_taken(orders: list[tuple[int, int]]) -> None:
    index = ArenaIndex(500, 100)
    reserved: dict[int, bytes] = {}
    pinned: list[int] = []
    for order, number in orders:
        key = bytes([number])
        if order == 0 and (slot := index.reserve()) is not None:
            assert slot not in reserved and slot not in pinned
            reserved[slot] = key
        elif order == 1 and reserved:
            slot, own = reserved.popitem()
            index.enter(own, slot)
        elif order == 2 and reserved:
            index.give_back(reserved.popitem()[0])
        elif order == 3:
            for slot in index.find([key]):
                index.pin(slot)
                pinned.append(slot)
        elif order == 4 and pinned:
            index.unpin(pinned.pop())
        index.check_integrity()
