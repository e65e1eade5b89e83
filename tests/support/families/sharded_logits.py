"""The logits of a model whose attention stage runs in threads, one per shard."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cluster.ranks.attention_shard import make_group
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.tensor_shard import TensorShard
from moe_serve.model.step_plan import MicroBatch, SequenceSlice, StepPlan
from moe_serve.pipeline.links.shard_group import FollowerTransport, LeaderTransport, ShardGroup
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.transport import LocalTransport

CPU = torch.device("cpu")
PAGES = (4, 9, 1, 7, 2, 8, 3)


@contextmanager
def connected(count: int, timeout_s: float = 60.0) -> Iterator[list[ShardGroup]]:
    """Yields shards that are connected within one process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for a, b in combinations(range(count), 2):
        ends[a][b], ends[b][a] = socket.socketpair()
    members = [
        make_group("attention-0", TensorShard(i, count), own, timeout_s)
        for i, own in enumerate(ends)
    ]
    try:
        yield members
    finally:
        for member in members:
            member.close()


def sharded_logits(
    folder: Path, count: int, dtype: torch.dtype, prompt: list[int], chunk: int
) -> tuple[Tensor, list[int]]:
    """Returns the logits of all positions, and the KV bytes of each shard."""

    def run(group: ShardGroup) -> tuple[Tensor, int]:
        try:
            return _run(folder, group, dtype, prompt, chunk)
        except BaseException:
            group.close()  # the others end too
            raise

    with connected(count) as members, ThreadPoolExecutor(count) as pool:
        results = list(pool.map(run, members))
    return results[0][0], [num_bytes for _, num_bytes in results]


def _run(
    folder: Path, group: ShardGroup, dtype: torch.dtype, prompt: list[int], chunk: int
) -> tuple[Tensor, int]:
    loader = ModelLoader(folder, kernels="native", dtype=dtype, num_threads=1)
    stage: AttentionStage = loader.attention_stage(512, group)
    cache = KVCache(stage.spec, 9, 16, dtype, CPU)
    if group.is_leader:
        transport = LeaderTransport(LocalTransport(loader.expert_stage()), group)
        pipeline = Pipeline(stage, transport, cache, CPU)
    else:
        pipeline = Pipeline(stage, FollowerTransport(group), cache, CPU)
    parts = []
    for start in range(0, len(prompt), chunk):
        if group.is_leader:
            group.order(b"go")
        else:
            assert group.next_order() == b"go", "an order is what was sent"
        ids = np.array(prompt[start : start + chunk])
        piece = SequenceSlice(0, start, ids, PAGES, len(ids))
        parts.append(pipeline.run(StepPlan((MicroBatch((piece,)),))))
    num_bytes = sum(layer.keys.nbytes for layer in cache.layers)
    return torch.cat(parts), num_bytes
