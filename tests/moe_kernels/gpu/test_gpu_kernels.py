"""The Triton set against the torch set: whole tiny models, from a checkpoint to logits.

The models are small because the interpreter is slow: each case takes seconds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from case import TINY, VOCAB_SIZE, Case
from parity import write_checkpoint
from torch import Tensor

from moe_kernels.choice import KernelsName
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport

SMALL = TINY | {"hidden_size": 32, "num_hidden_layers": 2}
CASES = {
    "qwen3_moe": Case(
        transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, intermediate_size=48, moe_intermediate_size=24, num_experts=4
        )
    ),
    "gpt_oss": Case(  # sinks, windows, biases everywhere, the clamped activation
        transformers.GptOssConfig(
            **SMALL, head_dim=16, intermediate_size=24, num_local_experts=4, sliding_window=8
        )
    ),
    "deepseek_v3": Case(  # latent attention, sigmoid router with groups, a shared expert
        transformers.DeepseekV3Config(
            **SMALL | {"num_key_value_heads": 4},
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=12,
            intermediate_size=40,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        )
    ),
}
PROMPT, DECODED = 19, 3
TOKENS = np.random.default_rng(5).integers(1, VOCAB_SIZE, PROMPT + DECODED)
WHOLE = (PROMPT, *(1,) * DECODED)  # lengths of the steps
CHUNKED = (7, 7, 5, *(1,) * DECODED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(root / name, case) for name, case in CASES.items()}


@cache
def logits(
    folder: Path, kernels: KernelsName, steps: tuple[int, ...], device: torch.device
) -> Tensor:
    """Of all tokens, fed in steps of these lengths, in fp32."""
    loader = ModelLoader(folder, kernels=kernels, dtype=torch.float32, device=device)
    assert loader.kernels.name.startswith(kernels), f"{loader.kernels.name}, not {kernels}"
    cache = KVCache(loader.spec, 5, torch.float32, device)
    stage = loader.attention_stage(64)
    pipeline = Pipeline(stage, LocalTransport(loader.expert_stage()), cache, device)
    parts, start = [], 0
    for length in steps:
        ids = TOKENS[start : start + length]
        piece = SequenceSlice(0, start, ids, (4, 2), length)
        parts.append(pipeline.run(StepPlan((MicroBatch((piece,)),))).cpu())
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("steps", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_has_the_logits_of_the_torch_set(
    folders: dict[str, Path], name: str, steps: tuple[int, ...], device: torch.device
) -> None:
    expected = logits(folders[name], "torch", WHOLE, device)
    error = (logits(folders[name], "triton", steps, device) - expected).abs().max()
    error /= expected.abs().max()
    assert error < 1e-4, f"{name}, steps of {steps}: {error=:.2e}"
