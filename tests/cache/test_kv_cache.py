"""Pages as tensors: copies, and which of them are finite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_serve.cache import kv_cache
from moe_serve.cache.kv_cache import KVCache


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
