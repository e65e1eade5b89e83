"""The experts of generated tokens, for requests that ask for them.

A token is sampled from the row of the position before it; what the routers chose for that row, in
the step that made the token, comes with it. The rest of a prompt is never told here. What is
computed again (after a preemption, or on another rank) comes to the same row.

N tokens, L layers with routed experts, K choices.
"""

from __future__ import annotations

import numpy as np

from moe_serve.engine.request.request import NO_EXPERTS, TokenExperts
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.route_tap import StepChoices

Made = dict[int, TokenExperts]  # sequence id -> the experts of the token that it is about to get


def sequences_that_ask(plan: StepPlan, schedule: Schedule) -> frozenset[int]:
    """Those that get a token from this step and want its experts."""
    asking = [key for key, (s, _) in schedule.items() if s.request.wants_routed_experts]
    if not asking:
        return frozenset()
    sampled = {piece.sequence_id for piece in plan.slices if piece.num_logits}
    return frozenset(sampled.intersection(asking))


def made_tokens(schedule: Schedule, choices: StepChoices | None) -> Made:
    """By sequence, before it advances."""
    found: Made = {}
    if choices is None:
        return found
    ids_NLK, end = choices.expert_ids_NLK, 0
    for key, count in zip(choices.sequence_ids, choices.counts, strict=True):
        end += count
        item = schedule.get(key)
        if item is not None and count and item[0].request.wants_routed_experts:
            row_LK, is_wide = ids_NLK[end - 1], ids_NLK.dtype.itemsize > 1
            row_LK = row_LK.astype(np.int16 if is_wide else np.uint8, copy=False)
            num_layers, top_k = row_LK.shape
            found[key] = TokenExperts(row_LK.tobytes(), num_layers, top_k, is_wide)
    return found


def experts_of(sequence: Sequence, made: Made) -> tuple[TokenExperts, ...] | None:
    """Of the token that it got; empty ones where a rank's message of them could not be used."""
    if not sequence.request.wants_routed_experts:
        return None
    return (made.get(sequence.id, NO_EXPERTS),)
