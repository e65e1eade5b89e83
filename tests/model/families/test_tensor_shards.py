"""An attention stage in shards: every logit has the bits of the unsharded stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from tests.support.families.all_cases import CASES
from tests.support.families.parity import model_logits, random_prompts, write_checkpoint
from tests.support.families.sharded_logits import CPU, sharded_logits
from tests.support.kernels.kernel_sets import KERNEL_SETS

NAMES = (  # of each kind of attention and of MLP
    "deepseek_v2-lite",
    "deepseek_v3-groups",
    "gpt_oss",
    "llama4-dense-layers",
    "minimax_m2",
    "qwen2_moe",
    "qwen3_moe-dense-layers",
)

pytestmark = list(KERNEL_SETS[1].marks)  # needs the native kernels


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CASES[request.param])


@pytest.mark.parametrize(("count", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_the_bits_do_not_change(folder: Path, count: int, dtype: torch.dtype) -> None:
    (prompt,) = random_prompts((50,))
    loader = ModelLoader(folder, kernels="native", dtype=dtype)
    for chunk in (50, 13):
        expected = model_logits(folder, "native", prompt, chunk, dtype)
        found, kv_bytes = sharded_logits(folder, count, dtype, prompt, chunk)
        assert found.shape == expected.shape, f"{found.shape} for {expected.shape}"
        assert torch.equal(found, expected), (
            f"{folder.name}, {count} shards, {chunk=}: {(found != expected).sum()} values differ, "
            f"by up to {(found - expected).abs().max():.2e}"
        )
    whole = sum(layer.keys.nbytes for layer in KVCache(loader.spec, 9, 16, dtype, CPU).layers)
    parts = 1 if loader.spec.latent else min(count, loader.spec.attention.num_kv_heads)
    assert kv_bytes == [whole // parts] * count, f"{kv_bytes} of {whole} bytes of keys"
