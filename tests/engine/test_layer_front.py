"""The first half of a layer in one call gives the bits of its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.kernel_choice import native_refusal
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport

CPU = torch.device("cpu")
REFUSAL = native_refusal(CPU, torch.float32)


def logits(folder: Path, dtype: torch.dtype, has_front: bool) -> Tensor:
    loader = ModelLoader(folder, dtype=dtype, kernels="native")
    stage = loader.attention_stage(512)
    assert all(front is not None for front in stage._fronts), "the native kernels have it"
    if not has_front:
        stage._fronts = (None,) * loader.spec.num_layers
    cache = KVCache(loader.spec, 9, 16, dtype, CPU)
    pipeline = Pipeline(stage, LocalTransport(loader.expert_stage()), cache, CPU)
    ids, parts = np.arange(1, 46), []
    for start, end in ((0, 33), (33, 44), (44, 45)):
        slices = (SequenceSlice(0, start, ids[start:end], (4, 9, 1), end - start),)
        parts.append(pipeline.run(StepPlan((MicroBatch(slices),))))
    return torch.cat(parts)


@pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral-window", "olmoe-clipped"])
def test_one_call_or_seven(checkpoints: dict[str, Path], variant: str, dtype: torch.dtype) -> None:
    whole, parts = (logits(checkpoints[variant], dtype, has_front) for has_front in (True, False))
    assert torch.equal(whole, parts), f"{variant}, {dtype}, {(whole - parts).abs().max()}"
