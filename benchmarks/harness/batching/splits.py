"""One set of running requests, split by each policy: experts that their next tokens activate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.batching.policies import expert_aware
from harness.batching.requests import Request, Routed, Signatures, num_activated
from moe_serve.engine.batch_policy.arrival_order import BALANCED, FIFO
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from routing_predictor.history import ChoiceHistory

HORIZON = 32
STEPS = (0, 8, 16, 24)  # of the horizon, that are counted
_CALLS = 8  # steps in which a split may improve before it is judged

MakeSignatures = Callable[[Sequence[Request]], Signatures]


@dataclass(frozen=True, slots=True)
class SplitCount:
    """Activated experts of one draw under one policy, over those under fifo."""

    size: int
    policy: str
    activated: float  # mean of the steps
    ratio: float


def signature_makers(routed: Routed) -> dict[str, MakeSignatures]:
    """By name: what is known when the horizon begins."""
    makers: dict[str, MakeSignatures] = {"history": lambda rs: _history(routed, rs, None)}
    if routed.predictor is not None:
        makers["predictor"] = lambda rs: routed.predicted(rs, 0)
        makers["predictor and history"] = lambda rs: _history(routed, rs, routed.predicted(rs, 0))
    makers["next 32 tokens known"] = lambda rs: routed.coming(rs, 0, HORIZON)
    return makers


def count_splits(
    routed: Routed, size: int, num_groups: int, tolerance: float, rng: np.random.Generator
) -> list[SplitCount]:
    """Every policy on the same draw."""
    requests = routed.draw(size, rng)
    slices = _slices(requests)
    splits = {p.name: p.split(slices, num_groups) for p in (FIFO, BALANCED)}
    for name, make in signature_makers(routed).items():
        splits[name] = _split(slices, make(requests), num_groups, 64, tolerance)
    counts: dict[str, list[int]] = {name: [] for name in (*splits, "oracle")}
    for step in STEPS:
        known = routed.coming(requests, step, 1)
        every = known[0].size
        splits["oracle"] = _split(slices, known, num_groups, every, tolerance)
        for name, batches in splits.items():
            counts[name].append(_count(batches, requests, step))
    base = np.mean(counts["fifo"])
    return [
        SplitCount(size, name, float(np.mean(each)), float(np.mean(each) / base))
        for name, each in counts.items()
    ]


def _history(routed: Routed, requests: Sequence[Request], prior: Signatures | None) -> Signatures:
    history, keys = ChoiceHistory(routed.num_experts), list(range(len(requests)))
    history.observe(keys, [request.past(0) for request in requests])
    made = history.signatures(keys, prior)
    assert made is not None, "choices were observed"
    return made


def _split(
    slices: list[SequenceSlice],
    signatures: Signatures,
    num_groups: int,
    max_dimensions: int,
    tolerance: float,
) -> tuple[MicroBatch, ...]:
    policy, table = expert_aware(max_dimensions, tolerance, 0)
    table.put([piece.sequence_id for piece in slices], signatures)
    for _ in range(_CALLS):
        batches = policy.split(slices, num_groups)
    return batches


def _slices(requests: Sequence[Request]) -> list[SequenceSlice]:
    token = np.zeros(1, dtype=np.int64)
    return [SequenceSlice(key, r.start, token, (0,), 1) for key, r in enumerate(requests)]


def _count(batches: Sequence[MicroBatch], requests: Sequence[Request], step: int) -> int:
    return num_activated(
        [[requests[s.sequence_id].choices(step) for s in batch.slices] for batch in batches]
    )
