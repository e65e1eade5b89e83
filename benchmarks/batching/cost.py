"""Measures the time that a batch policy takes in a step, on one core."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from batching.policies import expert_aware
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.expert_aware import ExpertAware
from moe_serve.engine.schedule.policy.signature_table import SignatureTable
from moe_serve.model.step_plan import SequenceSlice

_SHAPES = ((64, 6, 32), (256, 6, 32), (256, 60, 128))  # sequences, layers, experts
_STEPS = 200
_SEATS, _FREE = 64, (1, 4, 16, 64)
_JOINS = 30  # of each
_MOST_PASSED_OVER = 128

Signature = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Milliseconds of `split`: a new split, and a split after one sequence of a step was
    replaced.
    """

    num_sequences: int
    num_layers: int
    num_experts: int
    first_ms: float
    changed_ms: float  # median
    changed_worst_ms: float  # 99th percentile
    settled_ms: float


@dataclass(frozen=True, slots=True)
class JoinCost:
    """Milliseconds to choose the waiting requests that take the free seats among 64."""

    num_waiting: int
    num_free: int
    num_layers: int
    num_experts: int
    median_ms: float
    worst_ms: float  # 99th percentile


class _Kinds:
    """Random signatures of eight kinds of requests."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape, self.rng = (num_layers, num_experts), np.random.default_rng(0)
        self._kinds = self.rng.random((8, num_layers, num_experts)) ** 4

    def put(self, table: SignatureTable, key: int) -> None:
        noise = self.rng.random(self._shape) * 0.05
        signature: Signature = np.asarray(self._kinds[key % 8] * 0.8 + noise, dtype=np.float32)
        table.put([key], signature[None])


def time_splits() -> list[SplitCost]:
    return [_time_split(*shape) for shape in _SHAPES]


def time_joins() -> list[JoinCost]:
    """Measures the choice of joining requests with signatures of the largest shapes."""
    return [_time_join(shape, num_free) for shape in _SHAPES[1:] for num_free in _FREE]


def _time_split(num_sequences: int, num_layers: int, num_experts: int) -> SplitCost:
    made = _Kinds(num_layers, num_experts)
    policy, table = expert_aware(64, 0.12, 0)
    for key in range(num_sequences):
        made.put(table, key)
    keys = list(range(num_sequences))
    first, changed = _split_s(policy, keys), []
    for step in range(_STEPS):
        policy.forget([keys.pop(int(made.rng.integers(len(keys))))])
        keys.append(num_sequences + step)
        made.put(table, keys[-1])
        changed.append(_split_s(policy, keys))
    while _split_s(policy, keys) > min(changed) / 2 and len(changed) < 2 * _STEPS:
        changed.append(max(changed))  # not settled yet
    settled = min(_split_s(policy, keys) for _ in range(20))
    measured = np.array(changed[:_STEPS]) * 1e3
    return SplitCost(
        num_sequences, num_layers, num_experts, first * 1e3, float(np.median(measured)),
        float(np.percentile(measured, 99)), settled * 1e3,
    )  # fmt: skip


def _time_join(shape: tuple[int, int, int], num_free: int) -> JoinCost:
    num_waiting, num_layers, num_experts = shape
    made, seconds = _Kinds(num_layers, num_experts), []
    for _ in range(_JOINS):
        policy, table = expert_aware(64, 0.12, _MOST_PASSED_OVER)
        sequences = [_sequence(key) for key in range(_SEATS - num_free + num_waiting)]
        for sequence in sequences:
            made.put(table, sequence.id)
        running = sequences[: _SEATS - num_free]
        for sequence in running:
            sequence.is_running = True
        if running:
            _split_s(policy, [sequence.id for sequence in running])
        seconds.append(_join_s(policy, deque(sequences[len(running) :]), running, num_free))
    measured = np.array(seconds) * 1e3
    median, worst = float(np.median(measured)), float(np.percentile(measured, 99))
    return JoinCost(num_waiting, num_free, num_layers, num_experts, median, worst)


def _sequence(key: int) -> Sequence:
    params = SamplingParams()
    request = GenerationRequest(request_id=f"r{key}", prompt_token_ids=(1,), params=params)
    return Sequence(key, request)


def _join_s(
    policy: ExpertAware, waiting: deque[Sequence], running: list[Sequence], num_free: int
) -> float:
    """Returns the seconds of a choice; every request that the policy offers starts."""
    clock = time.thread_time()
    policy.prepare(waiting, running)
    for count, sequence in enumerate(policy.candidates(waiting, running), 1):
        sequence.is_running = True
        policy.started(sequence)
        if count == num_free:
            break
    return time.thread_time() - clock


def _split_s(policy: ExpertAware, keys: list[int]) -> float:
    token = np.zeros(1, dtype=np.int64)
    slices = [SequenceSlice(key, 1, token, (0,), 1) for key in keys]
    clock = time.thread_time()
    policy.split(slices, 2)
    return time.thread_time() - clock
