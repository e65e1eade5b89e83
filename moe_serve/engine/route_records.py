"""What the routers chose for live requests, told to whoever asked before the step.

    listener.wants(step, sequences)  ->  the plan asks the pipeline  ->  listener.take(records)

N tokens of one sequence in one step, L layers with routed experts, K choices.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.scheduler import Schedule
from moe_serve.engine.sequence import Sequence
from moe_serve.model.step_plan import RouteAsk, StepPlan
from moe_serve.pipeline.route_tap import StepChoices

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRecord:
    """Tokens at positions [start, start + N) of a request, and their experts in every layer.

    A request that was preempted, or moved to another rank, is told again from its beginning.
    """

    request_id: str
    sequence_id: int
    start: int
    num_prompt_tokens: int  # positions below this one are the prompt's
    token_ids_N: NDArray[np.int32]
    expert_ids_NLK: NDArray[np.integer[Any]]
    weights_NLK: NDArray[np.float16] | None = None  # if any listener wants them


class RouteListener(Protocol):
    """Called on the engine's thread, between steps: whatever it does delays the next one."""

    @property
    def has_weights(self) -> bool:
        """Whether it wants the routers' weights too."""
        ...

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """Which of these sequences it wants to hear of. Asked again, it says the same."""
        ...

    def take(self, records: list[RouteRecord]) -> None:
        """A step has ended. Holds also what only other listeners asked for."""
        ...


class RouteListeners:
    """All listeners of a server's engines. They come and go on any thread."""

    def __init__(self) -> None:
        self._listeners: tuple[RouteListener, ...] = ()

    def add(self, listener: RouteListener) -> None:
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: RouteListener) -> None:
        """Unknown ones are ignored."""
        self._listeners = tuple(each for each in self._listeners if each is not listener)

    def asked(self, plan: StepPlan, step: int, schedule: Schedule) -> StepPlan:
        """The plan, with what the listeners want to know of it."""
        listeners = self._listeners
        if not listeners:
            return plan
        sequences = {key: sequence for key, (sequence, _) in schedule.items()}
        wanted = frozenset(key for listener in listeners for key in listener.wants(step, sequences))
        if not wanted:
            return plan
        ask = RouteAsk(wanted, any(listener.has_weights for listener in listeners))
        return replace(plan, routes=ask)

    def tell(self, schedule: Schedule, choices: StepChoices | None) -> None:
        """What came of a step, before its sequences advance."""
        listeners = self._listeners
        if choices is None or not listeners:
            return
        records = _records(schedule, choices)
        for listener in listeners if records else ():
            listener.take(records)


def _records(schedule: Schedule, choices: StepChoices) -> list[RouteRecord]:
    records, end = [], 0
    for key, count in zip(choices.sequence_ids, choices.counts, strict=True):
        first, end = end, end + count
        if key not in schedule:
            continue  # it ended while the step ran
        sequence, _ = schedule[key]
        start, weights = sequence.num_computed_tokens, choices.weights_NLK
        tokens = np.array(sequence.token_ids[start : start + count], dtype=np.int32)
        if len(tokens) != count:
            _log.warning("%d choices came for %d tokens: not told", count, len(tokens))
            continue
        records.append(
            RouteRecord(
                request_id=sequence.request.request_id,
                sequence_id=key,
                start=start,
                num_prompt_tokens=sequence.num_prompt_tokens,
                token_ids_N=tokens,
                expert_ids_NLK=choices.expert_ids_NLK[first:end],
                weights_NLK=None if weights is None else weights[first:end],
            )
        )
    return records
