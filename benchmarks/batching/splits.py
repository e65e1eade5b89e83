"""Splits one set of running requests by each policy, and counts the experts of their next
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from batching.policies import expert_aware
from batching.requests import Request, Routed, Signatures, num_activated
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.policy.arrival_order import BALANCED, FIFO
from moe_serve.engine.schedule.policy.expert_aware import ExpertAware
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from routing_predictor.requests.history import ChoiceHistory

HORIZON = 32
STEPS = (0, 8, 16, 24)  # of the horizon, that are counted
_CALLS = 8  # steps in which a split may improve before it is judged

MakeSignatures = Callable[[Items[Request]], Signatures]


@dataclass(frozen=True, slots=True)
class SplitCount:
    """Activated experts of one draw under one policy, relative to fifo."""

    size: int
    policy: str
    activated: float  # mean of the steps
    ratio: float


def signature_makers(routed: Routed) -> dict[str, MakeSignatures]:
    """Returns the signatures by name, as they are known when the horizon begins."""
    makers: dict[str, MakeSignatures] = {"history": lambda rs: _history(routed, rs, None)}
    if routed.predictor is not None:
        makers["predictor"] = lambda rs: routed.predicted(rs, 0)
        makers["predictor and history"] = lambda rs: _history(routed, rs, routed.predicted(rs, 0))
    makers["next 32 tokens known"] = lambda rs: routed.coming(rs, 0, HORIZON)
    return makers


def count_splits(
    routed: Routed, size: int, num_groups: int, tolerance: float, rng: np.random.Generator
) -> list[SplitCount]:
    """Runs every policy on the same draw."""
    requests = routed.draw(size, rng)
    slices = _slices(requests)
    splits: dict[str, tuple[MicroBatch, ...]] = {
        p.name: p.split(slices, num_groups) for p in (FIFO, BALANCED)
    }
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


def count_bursts(
    routed: Routed,
    size: int,
    times: int,
    num_groups: int,
    tolerance: float,
    rng: np.random.Generator,
) -> list[SplitCount]:
    """Lets `times` as many requests as seats arrive together, chooses which get a seat, and splits
    them.

    fifo takes the first ones. No request has a history yet.
    """
    assert routed.predictor is not None, "no predictor was given"
    requests = routed.draw(size * times, rng)
    policy, table = expert_aware(64, tolerance, size * times)
    table.put(list(range(len(requests))), routed.predicted(requests, 0))
    policy.split(_slices(requests)[:num_groups], num_groups)  # sets the number of groups
    policy.forget(range(num_groups))
    table.put(list(range(num_groups)), routed.predicted(requests[:num_groups], 0))
    chosen = _seated(policy, len(requests), size)
    slices = _slices(requests)
    aware = [slices[key] for key in chosen]
    for _ in range(_CALLS):
        batches = policy.split(aware, num_groups)
    plain = FIFO.split(slices[:size], num_groups)
    counts = [[_count(each, requests, step) for step in STEPS] for each in (plain, batches)]
    base, activated = (float(np.mean(each)) for each in counts)
    return [
        SplitCount(size, "fifo", base, 1.0),
        SplitCount(size, "predictor", activated, activated / base),
    ]


def _seated(policy: ExpertAware, count: int, size: int) -> list[int]:
    params = SamplingParams()
    waiting = [
        Sequence(key, GenerationRequest(request_id=str(key), prompt_token_ids=(0,), params=params))
        for key in range(count)
    ]
    running: list[Sequence] = []
    policy.prepare(waiting, running)
    for sequence in policy.candidates(waiting, running):
        policy.started(sequence)
        sequence.is_running = True
        running.append(sequence)
        if len(running) == size:
            break
    return [sequence.id for sequence in running]


def _history(routed: Routed, requests: Items[Request], prior: Signatures | None) -> Signatures:
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


def _slices(requests: Items[Request]) -> list[SequenceSlice]:
    token = np.zeros(1, dtype=np.int64)
    return [SequenceSlice(key, r.start, token, (0,), 1) for key, r in enumerate(requests)]


def _count(batches: Items[MicroBatch], requests: Items[Request], step: int) -> int:
    return num_activated(
        [[requests[s.sequence_id].choices(step) for s in batch.slices] for batch in batches]
    )
