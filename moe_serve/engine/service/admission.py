"""Decides whether a new request can keep its target for the first token, before it is queued.

The decision uses the last snapshots that the engines published, plus the requests that were
accepted since. With several attention ranks the one with the earliest first token counts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from moe_serve.clock import Clock
from moe_serve.engine.request.first_token import FirstTokenForecast, Refusal
from moe_serve.engine.request.service_terms import Service
from moe_serve.engine.service.forecast import QueueSnapshot
from moe_serve.engine.service.forecast_calibration import Factors
from moe_serve.engine.service.order import Floats, StartOrder

LEAST_RETRY_S = 0.1
_NOW = np.zeros(1)
_MOST_ACCEPTED = 4096  # that are remembered if no turn ends
_LIFE = 2  # turns after which an accepted request is in a snapshot


@dataclass(slots=True)
class _Accepted:
    """A request that may not be in a snapshot yet. `turn`: the last one whose snapshot lacks it."""

    turn: int
    num_tokens: int
    key: float  # when it came
    raw_s: float | None  # its forecast, uncorrected
    has_entered: bool = False


class Admission:
    """Implements AdmissionCheck. The engine's thread calls `publish`, `withdraw` and `entered`, and
    the event loop everything else; both may call `raw_s`."""

    def __init__(
        self,
        order: StartOrder,
        priority_s: float,
        default_s: float,
        factors: Callable[[str, float], Factors],
        clock: Clock,
    ) -> None:
        """`priority_s`: seconds by which one level of priority moves the deadline. `default_s`: the
        target of a request without one. `factors`: corrects the forecasts of a tier; read from any
        thread."""
        self._order, self._priority_s, self._default_s = order, priority_s, default_s
        self._factors, self._clock = factors, clock
        self._ends_at: dict[int, float] = {}  # by engine: the predicted end of its last step
        self._snapshots: Mapping[int, QueueSnapshot] = {}  # by engine; replaced, never changed
        self._accepted: deque[_Accepted] = deque(maxlen=_MOST_ACCEPTED)
        self._refused: Counter[str] = Counter()

    def step_begun(self, engine: int, now: float, seconds: float, *, is_ahead: bool) -> None:
        """Notes that an engine has begun a step; `is_ahead`: it begins when the one under way
        ends."""
        begins_at = max(now, self._ends_at.get(engine, now)) if is_ahead else now
        self._ends_at[engine] = begins_at + seconds

    def _rest_s(self, engine: int, at_s: float | None) -> float:
        """Returns the seconds until the step under way ends, as predicted at its beginning."""
        now = self._clock() if at_s is None else at_s
        return max(0.0, self._ends_at.get(engine, now) - now)

    def publish(self, engine: int, snapshot: QueueSnapshot) -> None:
        """Replaces the snapshot of an engine."""
        self._snapshots = {**self._snapshots, engine: snapshot}

    def withdraw(self, engine: int) -> None:
        """Drops the snapshot of an engine that is lost."""
        self._snapshots = {key: each for key, each in self._snapshots.items() if key != engine}
        self._ends_at.pop(engine, None)

    @property
    def num_snapshots(self) -> int:
        """Number of engines that have published."""
        return len(self._snapshots)

    def num_refused(self, tier: str) -> int:
        """Returns how many requests of a tier were refused. Safe from any thread."""
        return self._refused[tier]

    def forecast(
        self,
        service: Service,
        num_prompt_tokens: int,
        priority: int = 0,
        at_s: float | None = None,
    ) -> FirstTokenForecast | None:
        """See `AdmissionCheck.forecast`. `at_s` (None: now): when the request comes."""
        raw_s = self.raw_s(service, num_prompt_tokens, priority, at_s)
        if raw_s is None:
            return None
        return self._corrected(service, raw_s)

    def _corrected(self, service: Service, raw_s: float) -> FirstTokenForecast:
        factors = self._factors(service.tier, raw_s)
        return FirstTokenForecast(predicted_s=raw_s * factors.median, p90_s=raw_s * factors.p90)

    def raw_s(
        self,
        service: Service,
        num_prompt_tokens: int,
        priority: int = 0,
        at_s: float | None = None,
    ) -> float | None:
        """Predicts the seconds to the first token without correction; None: not measured yet."""
        snapshots = self._snapshots
        if not snapshots:
            return None
        raw_s = math.inf
        turn = max(each.turn for each in snapshots.values())
        for engine, snapshot in snapshots.items():
            num_left = num_prompt_tokens * snapshot.uncached
            keys_at = self._keys_at(snapshot, service, num_prompt_tokens, priority)
            num_more, num_more_tokens = self._since(turn, float(keys_at(_NOW)[0]))
            found_s = snapshot.first_token_s(
                num_left,
                keys_at,
                num_more=num_more / len(snapshots),
                num_more_tokens=num_more_tokens * snapshot.uncached / len(snapshots),
            )
            raw_s = min(raw_s, self._rest_s(engine, at_s) + found_s)
        return raw_s

    def check(
        self,
        service: Service,
        num_prompt_tokens: int,
        priority: int = 0,
        at_s: float | None = None,
    ) -> Refusal | None:
        """See `AdmissionCheck.check`. `at_s` (None: now): when the request comes."""
        target_s = _first_target_s(service)
        raw_s = self.raw_s(service, num_prompt_tokens, priority, at_s)
        may_refuse = service.targets.is_strict or service.is_sheddable
        if raw_s is not None and target_s is not None and may_refuse:
            factor = self._factors(service.tier, raw_s).cautious
            if raw_s * factor > target_s:
                self._refused[service.tier] += 1
                return _refusal(raw_s, factor, target_s)
        turn = max((each.turn for each in self._snapshots.values()), default=0)
        while self._accepted and self._accepted[0].turn < turn:
            self._accepted.popleft()
        snapshot = next(iter(self._snapshots.values()), QueueSnapshot())
        key = float(self._keys_at(snapshot, service, num_prompt_tokens, priority)(_NOW)[0])
        self._accepted.append(_Accepted(turn + _LIFE - 1, num_prompt_tokens, key, raw_s))
        return None

    def _keys_at(
        self, snapshot: QueueSnapshot, service: Service, num_prompt_tokens: int, priority: int
    ) -> Callable[[Floats], Floats]:
        """Returns a function from seconds of waiting to the keys of a request that comes now."""
        work_s = num_prompt_tokens * snapshot.uncached * snapshot.token_s
        slack_s = self.slack_s(service, priority) - work_s
        keys_at = self._order.keys_over_time(slack_s, work_s, service.weight, priority)
        behind = snapshot.behind.get((service.tier, service.tenant))
        if behind is None:
            return keys_at
        return lambda ages: np.maximum(keys_at(ages), behind - ages)

    def entered(self, turn: int, num_prompt_tokens: int) -> float | None:
        """Notes that a request has reached an engine in a turn, whose snapshot will include it.
        Returns its forecast without correction; None if it was not accepted here, or was accepted
        long ago."""
        for each in tuple(self._accepted):
            if not each.has_entered and each.num_tokens == num_prompt_tokens:
                each.has_entered, each.turn = True, turn
                return each.raw_s
        return None

    def slack_s(self, service: Service, priority: int) -> float:
        """Returns the seconds from the arrival to the virtual deadline."""
        target_s = _first_target_s(service)
        if target_s is None:
            target_s = self._default_s
        return target_s + self._priority_s * priority

    def _since(self, turn: int, key: float) -> tuple[int, int]:
        """Returns the number of requests that the snapshot of a turn lacks and that go before a
        key, and their tokens."""
        counts = [
            each.num_tokens
            for each in tuple(self._accepted)
            if each.turn >= turn and each.key <= key
        ]
        return len(counts), sum(counts)


def _refusal(raw_s: float, factor: float, target_s: float) -> Refusal:
    """Names the time after which the forecast fits, as the queue becomes shorter by a second in
    each second."""
    return Refusal(
        predicted_ttft_s=raw_s * factor,
        target_ttft_s=target_s,
        retry_after_s=max(LEAST_RETRY_S, raw_s - target_s / factor),
    )


def _first_target_s(service: Service) -> float | None:
    """Returns the target that the first token must keep: its own, else that of the whole answer,
    which is certainly missed if not even the first token comes in time."""
    targets = service.targets
    return targets.ttft_s if targets.ttft_s is not None else targets.e2e_s
