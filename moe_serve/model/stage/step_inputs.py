"""A micro-batch as tensors: the inputs of the attention stage besides the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_kernels.interface.attention_shape import AttentionShape, StepRows
from moe_kernels.interface.kernels import Kernels
from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.spec import ModelSpec
from moe_serve.model.step_plan import MicroBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs: T tokens, R rows that want logits.

    Made once per step and micro-batch, on the device.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    kv_rows: Tensor  # int64 [T * Hkv], see KVCache.rows
    logit_rows: Tensor  # int64 [R]
    attention: Mapping[AttentionShape, Any]  # the kernels' own plan of each layer shape


def make_step_inputs(
    batch: MicroBatch, cache: KVCache, spec: ModelSpec, kernels: Kernels, device: torch.device
) -> StepInputs:
    """Lay out a micro-batch for the device: a few numpy arrays per step, none per token."""
    slices = batch.slices
    starts = np.array([s.start for s in slices], dtype=np.int64)
    counts = np.array([len(s.token_ids) for s in slices], dtype=np.int64)
    offsets = np.cumsum(counts) - counts
    tokens = np.concatenate([s.token_ids for s in slices])
    positions = np.arange(len(tokens)) - np.repeat(offsets - starts, counts)
    logit_rows = np.concatenate(
        [
            np.arange(offset + count - s.num_logits, offset + count)
            for s, offset, count in zip(slices, offsets, counts, strict=True)
        ]
    )
    tables = [s.page_table for s in slices]
    kv_rows = cache.rows(tables, starts.tolist(), counts.tolist())
    step = StepRows(counts, starts, tables, cache.page_size)
    return StepInputs(
        token_ids=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        kv_rows=torch.from_numpy(kv_rows).to(device),
        logit_rows=torch.from_numpy(logit_rows).to(device),
        attention={
            shape: kernels.plan_attention(step, shape, device)
            for shape in dict.fromkeys(layer.attention for layer in spec.layers)
        },
    )
