"""Passes the routers' choices for live requests to listeners that asked before the step.

    listener.wants(step, sequences)  ->  the plan asks the pipeline  ->  listener.take(records)

A request may also ask for the experts of its generated tokens. A token is sampled from the row of
the position before it, so it comes with the routers' choices for that row, made in the same step. A
run of tokens also computes the rows of all its tokens but the last. Other prompt rows are not
returned. A row that is computed again (after a preemption, or on another rank) gives the same
choices.

N tokens of one sequence in one step, L layers with routed experts, K choices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.request import NO_EXPERTS, TokenExperts
from moe_serve.engine.request.sequence import Schedule, Sequence, sequences_of
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.model.step_plan import RouteAsk, StepPlan
from moe_serve.pipeline.route_tap import StepChoices
from routing_predictor.traces.recording import TracedTokens

_log = logging.getLogger(__name__)

Runs = Mapping[int, tuple[Sampled, ...]]  # sequence id -> the tokens that a step sampled
Made = dict[int, tuple[TokenExperts, ...]]  # sequence id -> the experts of its next tokens


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
        """True if it also wants the routers' weights."""
        ...

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """Returns the ids of the sequences whose routes it wants. The answer for a step must not
        change. Engines that step together pass the same `step`."""
        ...

    def take(self, records: list[RouteRecord]) -> None:
        """Receives the records of a finished step, including those that only other listeners
        wanted."""
        ...


class RouteListeners:
    """All route listeners of a server's engines. They may be added and removed on any thread.

    Besides the server's listeners, each cell has its own, which hear only of the cell's engines.
    """

    def __init__(self, server: RouteListeners | None = None) -> None:
        """`server` are the listeners of all cells; None if these are the server's."""
        self._server = server
        self._own: tuple[RouteListener, ...] = ()

    @property
    def _listeners(self) -> tuple[RouteListener, ...]:
        return self._own if self._server is None else (*self._server._listeners, *self._own)

    def add(self, listener: RouteListener) -> None:
        self._own = (*self._own, listener)

    def remove(self, listener: RouteListener) -> None:
        """Removes a listener. Unknown ones are ignored."""
        self._own = tuple(each for each in self._own if each is not listener)

    def with_requests(self, plan: StepPlan, step: int, schedule: Schedule) -> StepPlan:
        """Returns the plan with the route requests of the listeners and of the sequences."""
        listeners, wanted = self._listeners, sequences_that_ask(plan, schedule)
        if not (listeners or wanted):
            return plan
        if listeners:
            sequences = sequences_of(schedule)
            wanted = wanted.union(*(each.wants(step, sequences) for each in listeners))
        if not wanted:
            return plan
        ask = RouteAsk(wanted, any(listener.has_weights for listener in listeners))
        return replace(plan, routes=ask)

    def notify(self, schedule: Schedule, choices: StepChoices | None, runs: Runs) -> None:
        """Passes the routes of a finished step to the listeners, before its sequences advance by
        the tokens of their runs."""
        listeners = self._listeners
        if choices is None or not listeners:
            return
        records = _records(schedule, choices, runs)
        for listener in listeners if records else ():
            listener.take(records)


class ListenerGroup(RouteListeners):
    """Adds listeners to a server's, and removes all of them together."""

    def __init__(self, of_server: RouteListeners) -> None:
        super().__init__()
        self._of_server = of_server

    def add(self, listener: RouteListener) -> None:
        """See `RouteListeners.add`."""
        super().add(listener)
        self._of_server.add(listener)

    def remove_all(self) -> None:
        """Removes the listeners that were added here."""
        for listener in self._listeners:
            self._of_server.remove(listener)


def _records(schedule: Schedule, choices: StepChoices, runs: Runs) -> list[RouteRecord]:
    """Builds records as views of the step's arrays. Sequences that ended during the step are left
    out, and so are rows of tokens that were not kept."""
    spans: list[tuple[Sequence, int, int]] = []  # the sequence, its first row, its rows kept
    tokens: list[int] = []
    end = 0
    for key, count in zip(choices.sequence_ids, choices.counts, strict=True):
        first, end = end, end + count
        if key not in schedule:
            continue
        computed = _computed_tokens(*schedule[key], runs.get(key, ()))
        if len(computed) > count:
            _log.warning(
                "received %d choices of experts for %d tokens; the routes of this step are dropped",
                count,
                len(computed),
            )
            return []
        spans.append((schedule[key][0], first, len(computed)))
        tokens += computed
    ids, weights = choices.expert_ids_NLK, choices.weights_NLK
    token_ids, records, end = np.array(tokens, dtype=np.int32), [], 0
    for sequence, first, count in spans:
        records.append(
            RouteRecord(
                request_id=sequence.request.request_id,
                sequence_id=sequence.id,
                start=sequence.num_computed_tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
                token_ids_N=token_ids[end : end + count],
                expert_ids_NLK=ids[first : first + count],
                weights_NLK=None if weights is None else weights[first : first + count],
                adapter=sequence.request.adapter_label,
            )
        )
        end += count
    return records


def _computed_tokens(sequence: Sequence, count: int, run: tuple[Sampled, ...]) -> list[int]:
    """Returns the tokens whose rows a step computed: the scheduled `count`, and those of the run
    but the last."""
    start = sequence.num_computed_tokens
    scheduled = sequence.token_ids[start : start + count]
    return scheduled + [s.token_id for s in run[:-1]] if len(run) > 1 else scheduled


def sequences_that_ask(plan: StepPlan, schedule: Schedule) -> frozenset[int]:
    """Returns the sequences that want the experts of a token that they get from this step, or from
    a later one behind the rows of this step."""
    asking = [key for key, (s, _) in schedule.items() if s.request.wants_routed_experts]
    if not asking:
        return frozenset()
    # Tokens that pass the layers in several steps are asked for in each of them.
    sampled = {piece.sequence_id for piece in plan.slices if piece.num_logits or piece.layers}
    return frozenset(sampled.intersection(asking))


def made_tokens(schedule: Schedule, choices: StepChoices | None, runs: Runs) -> Made:
    """Returns the experts of the tokens about to be appended, by sequence id."""
    found: Made = {}
    if choices is None:
        return found
    ids_NLK, end = choices.expert_ids_NLK, 0
    for key, count in zip(choices.sequence_ids, choices.counts, strict=True):
        first, end = end, end + count
        if key in schedule and schedule[key][0].request.wants_routed_experts:
            begin = first + schedule[key][1] - 1  # the row from which the first token was sampled
            stop = begin + len(runs.get(key, ()))
            if stop <= end:
                found[key] = tuple([_experts_of_row(ids_NLK[row]) for row in range(begin, stop)])
    return found


def _experts_of_row(row_LK: NDArray[np.integer[Any]]) -> TokenExperts:
    is_wide = row_LK.dtype.itemsize > 1
    row_LK = row_LK.astype(np.int16 if is_wide else np.uint8, copy=False)
    num_layers, top_k = row_LK.shape
    return TokenExperts(row_LK.tobytes(), num_layers, top_k, is_wide)


def experts_of(sequence: Sequence, made: Made, num_tokens: int) -> tuple[TokenExperts, ...] | None:
    """Returns the experts of a sequence's new tokens; empty ones if a rank's message was
    unusable."""
    if not sequence.request.wants_routed_experts:
        return None
    return made.get(sequence.id, (NO_EXPERTS,) * num_tokens)
