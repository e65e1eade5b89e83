"""Small traces with everything in them."""

from __future__ import annotations

import numpy as np

from routing_predictor.traces.trace import DECODE, PREFILL, RoutingTrace


def make_trace(
    num_requests: int = 4,
    num_tokens: int = 6,
    *,
    num_experts: int = 8,
    layers: tuple[int, ...] = (1, 3),
    top_k: int = 2,
    seed: int = 0,
    recording: str = "",
    is_full: bool = True,
) -> RoutingTrace:
    """Makes requests of `num_tokens` tokens each, of which half are the prompt."""
    rng = np.random.default_rng(seed)
    count = num_requests * num_tokens
    ids = rng.permuted(np.tile(np.arange(num_experts), (count, len(layers), 1)), axis=2)
    position = np.tile(np.arange(num_tokens), num_requests)
    return RoutingTrace(
        expert_ids_NLK=ids[:, :, :top_k].astype(np.uint8 if num_experts <= 256 else np.int16),
        request_N=np.repeat(np.arange(num_requests), num_tokens).astype(np.int32),
        position_N=position.astype(np.int32),
        phase_N=np.where(position < num_tokens // 2, PREFILL, DECODE).astype(np.uint8),
        num_experts=num_experts,
        layers=layers,
        request_ids=tuple(f"r{index}" for index in range(num_requests)),
        labels=tuple("ab"[index % 2] for index in range(num_requests)) if is_full else (),
        model="tiny",
        model_identity="00ff",
        token_N=rng.integers(0, 99, count).astype(np.int32) if is_full else None,
        weights_NLK=rng.random((count, len(layers), top_k)).astype(np.float16) if is_full else None,
        recording=recording,
    )


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    """Returns True if both are equal in every field, arrays bit for bit."""
    for name in RoutingTrace.__slots__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            if not (isinstance(theirs, np.ndarray) and mine.dtype == theirs.dtype):
                return False
            if not np.array_equal(mine, theirs):
                return False
        elif mine != theirs:
            return False
    return True
