"""Passes the routers' choices for live requests to listeners that asked before the step.

    listener.wants(step, sequences)  ->  the plan asks the pipeline  ->  listener.take(records)

A request may also ask for the experts of its generated tokens. A token is sampled from the row of
the position before it, so it comes with the routers' choices for that row, made in the same step.
Other prompt rows are not returned. A row that is computed again (after a preemption, or on another
rank) gives the same choices.

N tokens of one sequence in one step, L layers with routed experts, K choices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from moe_serve.engine.request.request import NO_EXPERTS, TokenExperts
from moe_serve.engine.request.sequence import Schedule, Sequence, sequences_of
from moe_serve.model.step_plan import RouteAsk, StepPlan
from moe_serve.pipeline.route_tap import StepChoices
from routing_predictor.traces.recording import TracedTokens

_log = logging.getLogger(__name__)

Made = dict[int, TokenExperts]  # sequence id -> the experts of its next token


class RouteRecord(TracedTokens, frozen=True, kw_only=True, eq=False, gc=False):
    """Tokens at positions [start, start + N) of a request, and their experts in every layer.

    A request that was preempted, or moved to another rank, is recorded again from its beginning.
    Weights are present if any listener wants them.
    """

    sequence_id: int


class RouteListener(Protocol):
    """Receives routes on the engine's thread between steps, so slow listeners delay the next
    step."""

    @property
    def has_weights(self) -> bool:
        """Whether it also wants the routers' weights."""
        ...

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """Return the ids of the sequences whose routes it wants. The answer for a step must not
        change. Engines that step together pass the same `step`."""
        ...

    def take(self, records: list[RouteRecord]) -> None:
        """Receive the records of a finished step, including those that only other listeners
        wanted."""
        ...


class RouteListeners:
    """All route listeners of a server's engines. They may be added and removed on any thread."""

    def __init__(self) -> None:
        self._listeners: tuple[RouteListener, ...] = ()

    def add(self, listener: RouteListener) -> None:
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: RouteListener) -> None:
        """Remove a listener. Unknown ones are ignored."""
        self._listeners = tuple(each for each in self._listeners if each is not listener)

    def with_requests(self, plan: StepPlan, step: int, schedule: Schedule) -> StepPlan:
        """Return the plan with the route requests of the listeners and of the sequences."""
        listeners, wanted = self._listeners, sequences_that_ask(plan, schedule)
        if listeners:
            sequences = sequences_of(schedule)
            wanted = wanted.union(*(each.wants(step, sequences) for each in listeners))
        if not wanted:
            return plan
        ask = RouteAsk(wanted, any(listener.has_weights for listener in listeners))
        return replace(plan, routes=ask)

    def notify(self, schedule: Schedule, choices: StepChoices | None) -> None:
        """Pass the routes of a finished step to the listeners, before its sequences advance."""
        listeners = self._listeners
        if choices is None or not listeners:
            return
        records = _records(schedule, choices)
        for listener in listeners if records else ():
            listener.take(records)


def _records(schedule: Schedule, choices: StepChoices) -> list[RouteRecord]:
    """Build records as views of the step's arrays. Sequences that ended during the step are left
    out."""
    known = [schedule.get(key) for key in choices.sequence_ids]
    tokens: list[int] = []
    for item, count in zip(known, choices.counts, strict=True):
        sequence = None if item is None else item[0]
        start = 0 if sequence is None else sequence.num_computed_tokens
        told = [0] * count if sequence is None else sequence.token_ids[start : start + count]
        tokens += told
        if len(told) != count:
            _log.warning(
                "received %d choices of experts for %d tokens; the routes of this step are dropped",
                count,
                len(told),
            )
            return []
    token_ids = np.array(tokens, dtype=np.int32)
    ids, weights = choices.expert_ids_NLK, choices.weights_NLK
    records, end = [], 0
    for item, count in zip(known, choices.counts, strict=True):
        first, end = end, end + count
        if item is not None:
            records.append(
                RouteRecord(
                    request_id=item[0].request.request_id,
                    sequence_id=item[0].id,
                    start=item[0].num_computed_tokens,
                    num_prompt_tokens=item[0].num_prompt_tokens,
                    token_ids_N=token_ids[first:end],
                    expert_ids_NLK=ids[first:end],
                    weights_NLK=None if weights is None else weights[first:end],
                )
            )
    return records


def sequences_that_ask(plan: StepPlan, schedule: Schedule) -> frozenset[int]:
    """Return the sequences that get a token from this step and want its experts."""
    asking = [key for key, (s, _) in schedule.items() if s.request.wants_routed_experts]
    if not asking:
        return frozenset()
    sampled = {piece.sequence_id for piece in plan.slices if piece.num_logits}
    return frozenset(sampled.intersection(asking))


def made_tokens(schedule: Schedule, choices: StepChoices | None) -> Made:
    """Return the experts of the tokens about to be appended, by sequence id."""
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
    """Return the experts of a sequence's new token; empty ones if a rank's message was unusable."""
    if not sequence.request.wants_routed_experts:
        return None
    return (made.get(sequence.id, NO_EXPERTS),)
