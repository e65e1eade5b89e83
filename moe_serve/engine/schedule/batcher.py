"""Turns a schedule into a step plan: token ids, page tables, and the split into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.drafting.draft import Draft
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.layered_prefill import LayeredPrefill
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from moe_serve.model.step_plan import LayerRange, MicroBatch, SequenceSlice, StepPlan

NO_DRAFTS: Mapping[int, Draft] = {}
_UNKNOWN = np.zeros(1, dtype=np.int64)


def make_step_plan(
    schedule: Schedule,
    max_micro_batches: int,
    policy: BatchPolicy,
    drafts: Mapping[int, Draft] = NO_DRAFTS,
    layered: LayeredPrefill | None = None,
) -> StepPlan:
    """Plans the scheduled sequences and their drafts in at most `max_micro_batches` groups.

    `layered` knows the sequences that take part in some layers only. They join a group of the
    others, so that the experts multiply all these rows together."""
    ranges, parked = ({}, ()) if layered is None else (layered.ranges, layered.parked)
    slices = [
        _slice(s, count, drafts.get(key))
        for key, (s, count) in schedule.items()
        if key not in ranges
    ]
    if not ranges:
        plan = _plan(slices, max_micro_batches, policy)
        return replace(plan, parked=parked) if parked else plan
    joining = [_joining(*schedule[key], layers) for key, layers in ranges.items()]
    plan = StepPlan(()) if not slices else _plan(slices, max_micro_batches, policy)
    batches = sorted(plan.micro_batches, key=lambda batch: batch.num_tokens, reverse=True)
    smallest = batches.pop().slices if batches else ()
    batches.append(MicroBatch((*smallest, *joining)))
    return replace(plan, micro_batches=tuple(batches), parked=parked)


def _joining(sequence: Sequence, count: int, layers: LayerRange) -> SequenceSlice:
    piece = replace(_slice(sequence, count, None), layers=layers)
    return piece if layers.is_last else replace(piece, num_logits=0)


def make_next_plan(schedule: Schedule, max_micro_batches: int, policy: BatchPolicy) -> StepPlan:
    """Plans the step after one whose tokens are not known yet. It computes one token of each
    sequence, which is about to be sampled. The executor fills it in; here it is 0."""
    slices = [_piece(s, s.num_tokens, _UNKNOWN, 1) for s, _ in schedule.values()]
    return _plan(slices, max_micro_batches, policy)


def _plan(slices: list[SequenceSlice], max_micro_batches: int, policy: BatchPolicy) -> StepPlan:
    micro_batches = policy.split(slices, max_micro_batches)
    return StepPlan(micro_batches, needed_LE=policy.needed(slices))


def _slice(sequence: Sequence, count: int, draft: Draft | None) -> SequenceSlice:
    start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
    num_logits = 1 if end == sequence.num_tokens else 0
    if sequence.wants_prompt_logprobs:
        num_logits = count
    tokens = sequence.pending(count)
    if draft is None:
        return _piece(sequence, start, tokens, num_logits)
    drafted = np.array(draft.token_ids, dtype=np.int64)
    tokens, count = np.concatenate([tokens, drafted]), len(drafted)
    return _piece(sequence, start, tokens, 1 + count, count)


def _piece(
    sequence: Sequence, start: int, tokens: NDArray[np.int64], num_logits: int, num_drafted: int = 0
) -> SequenceSlice:
    """Returns tokens of a sequence with the pages that they see."""
    table, hidden = sequence.page_table, sequence.hidden_pages(start)
    if hidden:
        table = table[: hidden.start] + table[hidden.stop :]
    return SequenceSlice(
        sequence.id,
        start,
        tokens,
        tuple(table),
        num_logits,
        num_drafted,
        adapter=sequence.request.adapter_digest,
        num_dropped=len(hidden) * sequence.page_size,
    )
