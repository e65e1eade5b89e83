"""A shard's part of the weights: the parts make up the whole, and odd numbers are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_kernels.interface.quantised_matrix import joined_rows, only_floats
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.errors import ConfigError
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.tensor_shard import (
    AttentionWeights,
    TensorShard,
    check_shards,
    column_borders,
)


@cache
def spec_with(num_heads: int, num_kv_heads: int) -> ModelSpec:
    spec = ServedCheckpoint.read(ModelConfig()).spec
    layers = tuple(
        replace(
            layer,
            attention=replace(layer.attention, num_heads=num_heads, num_kv_heads=num_kv_heads),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


@given(width=st.integers(1, 5000), count=st.integers(1, 64))
def test_columns_are_shared_out(width: int, count: int) -> None:
    borders = column_borders(width, count)
    assert len(borders) == count + 1 and borders[0] == 0 and borders[-1] == width
    parts = [end - start for start, end in zip(borders, borders[1:], strict=False)]
    assert min(parts) >= 0 and max(parts) - min(parts) <= 31, f"{parts}: a panel and its rest"
    if width >= 16 * count:
        assert all(border % 16 == 0 for border in borders[:-1]), f"{borders} cut panels"
        assert min(parts) > 0, f"{parts}: a shard with nothing to do"


@pytest.mark.parametrize(("num_kv_heads", "count", "held"), [(8, 2, 4), (8, 8, 1), (2, 8, 1)])
def test_heads_and_pages_are_shared_out(num_kv_heads: int, count: int, held: int) -> None:
    """Query heads stay with the key head that they read."""
    spec = spec_with(16, num_kv_heads)
    check_shards(spec, count)
    dim, width = spec.attention.head_dim, 3
    heads = {"q": 16, "k": num_kv_heads, "v": num_kv_heads}
    weights = {
        key: torch.arange(num).repeat_interleave(dim)[:, None].expand(-1, width)
        for key, num in heads.items()
    }
    weights["o"] = torch.arange(64)[:, None].expand(-1, 16 * dim)
    shards = [TensorShard(index, count) for index in range(count)]
    whole = AttentionWeights(tensors={}, matrices=weights)
    parts = [shard.attention(whole, spec, 0).matrices for shard in shards]
    for key in ("q", "o"):
        joined = joined_rows([part[key] for part in parts])
        assert torch.equal(only_floats(joined), weights[key])
    for shard, part in zip(shards, parts, strict=True):
        own = shard.spec(spec)
        assert (own.attention.num_heads, own.attention.num_kv_heads) == (16 // count, held)
        assert (
            len(part["q"]) == 16 // count * dim and len(part["k"]) == len(part["v"]) == held * dim
        )
        q, k = (only_floats(part[key]) for key in ("q", "k"))
        read = (q[:, 0] // (16 // num_kv_heads)).unique().tolist()
        assert k[:, 0].unique().tolist() == read, f"{shard}: queries of other keys"
        share = own.kv_bytes_per_token(2) / spec.kv_bytes_per_token(2)
        assert share == held / num_kv_heads, f"{share} of the pages"


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "count", "why"),
    [
        (16, 4, 3, r"attention_tp \(3\) does not divide the model's 16 query heads"),
        (24, 6, 4, r"attention_tp \(4\) must divide the model's 6 key/value heads, or be a mult"),
    ],
)
def test_what_cannot_be_split(num_heads: int, num_kv_heads: int, count: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_shards(spec_with(num_heads, num_kv_heads), count)
