"""What the policy itself costs in a step: time of one core, whatever else runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from harness.batching.policies import expert_aware
from moe_serve.model.step_plan import SequenceSlice

_SHAPES = ((64, 6, 32), (256, 6, 32), (256, 60, 128))  # sequences, layers, experts
_STEPS = 200


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Milliseconds of `split`: made from nothing, and when one sequence in a step is replaced."""

    num_sequences: int
    num_layers: int
    num_experts: int
    first_ms: float
    changed_ms: float  # median
    changed_worst_ms: float  # 99th percentile
    settled_ms: float


def time_splits() -> list[SplitCost]:
    """Random signatures of eight kinds."""
    return [_time(*shape) for shape in _SHAPES]


def _time(num_sequences: int, num_layers: int, num_experts: int) -> SplitCost:
    rng = np.random.default_rng(0)
    kinds = rng.random((8, num_layers, num_experts)) ** 4
    policy, table = expert_aware(64, 0.12, 0)

    def signature(key: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        noise = rng.random((num_layers, num_experts)) * 0.05
        return np.asarray(kinds[key % 8] * 0.8 + noise, dtype=np.float32)[None]

    for key in range(num_sequences):
        table.put([key], signature(key))
    keys = list(range(num_sequences))
    first, changed = _seconds(policy, keys), []
    for step in range(_STEPS):
        policy.forget([keys.pop(int(rng.integers(len(keys))))])
        keys.append(num_sequences + step)
        table.put([keys[-1]], signature(keys[-1]))
        changed.append(_seconds(policy, keys))
    while _seconds(policy, keys) > min(changed) / 2 and len(changed) < 2 * _STEPS:
        changed.append(max(changed))  # not settled yet
    settled = min(_seconds(policy, keys) for _ in range(20))
    measured = np.array(changed[:_STEPS]) * 1e3
    return SplitCost(
        num_sequences, num_layers, num_experts, first * 1e3, float(np.median(measured)),
        float(np.percentile(measured, 99)), settled * 1e3,
    )  # fmt: skip


def _seconds(policy: object, keys: list[int]) -> float:
    token = np.zeros(1, dtype=np.int64)
    slices = [SequenceSlice(key, 1, token, (0,), 1) for key in keys]
    clock = time.thread_time()
    policy.split(slices, 2)  # type: ignore[attr-defined]
    return time.thread_time() - clock
