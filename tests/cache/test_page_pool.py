"""Pages: handed out once, given back once, and the check that notices anything else."""

from __future__ import annotations

import pytest

from moe_serve.cache.kv_cache import num_pages
from moe_serve.cache.prefix_cache import PagePool
from moe_serve.config.sections import CacheConfig
from moe_serve.errors import ConfigError


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
