"""Latent attention: how many bytes a token holds in the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from tests.support.families.cases.deepseek import CASES
from tests.support.families.parity import write_checkpoint
from tests.support.families.published import (
    GLM_FLASH,
    KIMI_K2,
    MISTRAL_SMALL_4,
    V2_LITE,
    V3,
    spec_of,
)

PAGE_SIZE = 16


def test_deepseek_v3_holds_576_values_per_token_and_layer() -> None:
    spec = spec_of(V3)
    latent = spec.latent
    assert latent is not None, "latent attention"
    assert spec.kv_values_per_token == 512 + 64, "the latent and the shared rotary key"
    expanded = latent.num_heads * (latent.nope_dim + latent.value_dim)
    assert expanded == 32_768, "keys (less the shared part) and values of 128 heads"
    assert spec.kv_bytes_per_token(2) == 61 * 576 * 2 == 70_272, "bf16, over 61 layers"


@pytest.mark.parametrize(
    ("config", "values"),
    [(V2_LITE, 576), (KIMI_K2, 576), (GLM_FLASH, 576), (MISTRAL_SMALL_4, 320)],
    ids=["V2-Lite", "Kimi-K2", "GLM-4.7-Flash", "Mistral-Small-4"],
)
def test_values_per_token_are_the_latent_and_the_rotary_key(
    config: dict[str, object], values: int
) -> None:
    assert spec_of(config).kv_values_per_token == values, "per layer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cache_holds_no_more_than_that(dtype: torch.dtype, tmp_path: Path) -> None:
    """The memory is counted as allocated: keys and values are views of one storage."""
    spec = ModelLoader(write_checkpoint(tmp_path, CASES["deepseek_v3-groups"])).spec
    num_pages = 4
    cache = KVCache(spec, num_pages, PAGE_SIZE, dtype, torch.device("cpu"))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    }
    assert len(storages) == spec.num_layers, "one storage per layer"
    num_tokens = (num_pages + 2) * PAGE_SIZE  # page 0 stays empty, the last is scratch
    expected = spec.num_layers * (40 + 12) * dtype.itemsize
    assert sum(storages.values()) == num_tokens * expected, f"bytes of {num_tokens} tokens"
    assert spec.kv_bytes_per_token(dtype.itemsize) == expected, "as the spec says"
