"""Pages as tensors: how many there are, how they are copied, and which are finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_serve.cache import kv_cache
from moe_serve.cache.kv_cache import KVCache, num_pages
from moe_serve.cache.prefix_cache import PagePool
from moe_serve.config.sections import CacheConfig
from moe_serve.errors import ConfigError


def make_cache(num_pages: int = 7) -> KVCache:
    attention = SimpleNamespace(num_kv_heads=2, head_dim=4, value_width=4)
    spec: Any = SimpleNamespace(attention=attention, latent=None, num_layers=2)
    cache = KVCache(spec, num_pages, 16, torch.float32, torch.device("cpu"))
    for i, layer in enumerate(cache.layers):
        for part in (layer.keys, layer.values):
            part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(i)))
    return cache


def test_copies_read_before_they_write() -> None:
    cache = make_cache()
    before = [part.clone() for layer in cache.layers for part in (layer.keys, layer.values)]
    cache.copy([(1, 2), (2, 3), (5, 6)])
    after = [part for layer in cache.layers for part in (layer.keys, layer.values)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[[0, 1, 1, 2, 4, 5, 5, 7, 8]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_makes_a_page_unsound(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_PAGES_AT_ONCE", 3)
    cache = make_cache()
    assert cache.finite([1, 2, 3, 4, 5, 6, 7]) == [True] * 7
    cache.layers[1].values[5, 1, 15, 3] = value
    cache.layers[0].keys[2, 0, 0, 0] = value
    assert cache.finite([1, 2, 3, 4, 5, 6, 7]) == [True, False, True, True, False, True, True]
    assert cache.finite([]) == []


def test_allocate_and_release() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.check_integrity([first, second])
    assert sorted(pool.release(first)) == sorted(first)
    pool.check_integrity([second])
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(first)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [([[1, 2]], "page 2: held 1 times, recorded 0"), ([], "page 1: held 0 times, recorded 1"),
     ([[1], [1]], "page 1: held 2 times, recorded 1"), ([[1, 0]], "the empty page")],
    ids=str,
)  # fmt: skip
def test_integrity_sees_what_is_wrong(tables: list[list[int]], complaint: str) -> None:
    pool = PagePool(5)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity(tables)


def size(config: CacheConfig, available: int = 10**9) -> int:
    return num_pages(
        config, bytes_per_token=1000, max_model_len=160, max_num_seqs=8, available_bytes=available
    )


def test_sizing() -> None:
    assert size(CacheConfig(num_pages=33)) == 33
    assert size(CacheConfig(memory_bytes=16_000 * 12)) == 12
    assert size(CacheConfig()) == 40  # 8 sequences of 80 tokens
    assert size(CacheConfig(), available=16_000 * 50) == 15  # 30% of the memory
    with pytest.raises(
        ConfigError, match=r"9 pages of 16 tokens \(144 tokens.*max_model_len \(160\)"
    ):
        size(CacheConfig(num_pages=9))
