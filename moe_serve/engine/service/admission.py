"""Decides whether a new request can keep its target for the first token, before it is queued.

The decision uses the last snapshots that the engines published, plus the requests that were
accepted since. With several attention ranks, or cells, the one with the earliest first token
counts. Cells and ranks that are closed to new requests do not count, unless all are.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
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
_LIFE = 2  # turns of one cell after which an accepted request is in a snapshot


@dataclass(slots=True)
class _Accepted:
    """A request that may not be in a snapshot yet. `turn`: the last one whose snapshot lacks it."""

    turn: int
    num_tokens: int
    key: float  # when it came
    raw_s: float | None  # its forecast, uncorrected
    cell: int | None = None  # that it has entered


@dataclass(frozen=True, slots=True)
class _CellTurns:
    """The turns of the last snapshots: of all, and of each cell. `num_engines`: by cell."""

    last: int
    by_cell: Mapping[int, int]
    num_engines: Counter[int]

    @classmethod
    def of(cls, snapshots: Items[QueueSnapshot]) -> _CellTurns:
        by_cell: dict[int, int] = {}
        for each in snapshots:
            by_cell[each.cell] = max(by_cell.get(each.cell, 0), each.turn)
        num_engines = Counter([each.cell for each in snapshots])
        return cls(max(by_cell.values(), default=0), by_cell, num_engines)

    def include(self, accepted: _Accepted) -> bool:
        """Returns whether the snapshots include an accepted request."""
        last = self.last
        if accepted.cell is not None:
            last = self.by_cell.get(accepted.cell, last)
        return accepted.turn < last

    def share(self, accepted: _Accepted) -> float:
        """Returns the probability that an accepted request goes to a given possible engine."""
        if accepted.cell is None:
            return 1 / self.num_engines.total()
        return 1 / self.num_engines[accepted.cell]


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
        """`priority_s` is the number of seconds by which one level of priority moves the deadline.
        `default_s` is the target of a request without one. `factors` corrects the forecasts of a
        tier and may be called from any thread.
        """
        self._order, self._priority_s, self._default_s = order, priority_s, default_s
        self._factors, self._clock = factors, clock
        self._ends_at: dict[int, float] = {}  # by engine: the predicted end of its last step
        self._num_steps: Counter[int] = Counter()  # by engine: steps begun since its snapshot
        self._snapshots: Mapping[int, QueueSnapshot] = {}  # by engine; replaced, never changed
        self._closed: set[int] = set()  # cells that take no requests
        self._closed_engines: set[int] = set()  # likewise
        self._accepted: deque[_Accepted] = deque(maxlen=_MOST_ACCEPTED)
        self._refused: Counter[str] = Counter()

    def step_begun(self, engine: int, now: float, seconds: float, *, is_ahead: bool) -> None:
        """Notes that an engine has begun a step. With `is_ahead` it begins when the running step
        ends.
        """
        begins_at = max(now, self._ends_at.get(engine, now)) if is_ahead else now
        self._ends_at[engine] = begins_at + seconds
        self._num_steps[engine] += 1

    def _rest_s(self, engine: int, at_s: float | None) -> float:
        """Returns the seconds until the running step ends, as predicted at its beginning."""
        now = self._clock() if at_s is None else at_s
        return max(0.0, self._ends_at.get(engine, now) - now)

    def publish(self, engine: int, snapshot: QueueSnapshot) -> None:
        """Replaces the snapshot of an engine."""
        self._num_steps[engine] = 0
        self._snapshots = {**self._snapshots, engine: snapshot}

    def withdraw(self, engine: int) -> None:
        """Drops the snapshot of an engine that is lost."""
        self._snapshots = {key: each for key, each in self._snapshots.items() if key != engine}
        self._ends_at.pop(engine, None)
        del self._num_steps[engine]
        self._closed_engines.discard(engine)

    def set_engine_open(self, engine: int, *, is_open: bool) -> None:
        """Sets if an engine takes new requests. It is called on the engine's thread."""
        if is_open:
            self._closed_engines.discard(engine)
        else:
            self._closed_engines.add(engine)

    def set_open(self, cell: int, *, is_open: bool) -> None:
        """Notes whether a cell takes new requests. Safe from any thread."""
        if is_open:
            self._closed.discard(cell)
        else:
            self._closed.add(cell)

    def remove_cell(self, cell: int) -> None:
        """Drops the snapshots of a cell that is gone."""
        self.set_open(cell, is_open=True)
        self._snapshots = {key: each for key, each in self._snapshots.items() if each.cell != cell}

    @property
    def num_snapshots(self) -> int:
        """Number of engines that have published and take requests."""
        return len(self._open_snapshots)

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
        snapshots = self._open_snapshots
        if not snapshots:
            return None
        raw_s, turns = math.inf, _CellTurns.of([*snapshots.values()])
        for engine, published in snapshots.items():
            rest_s = self._rest_s(engine, at_s)
            snapshot = published.after(self._num_steps[engine])
            found_s = self._in_order_s(snapshot, num_prompt_tokens, turns)
            if found_s is None or rest_s + found_s > self.slack_s(service, priority):
                found_s = self._by_key_s(snapshot, service, num_prompt_tokens, priority, turns)
            raw_s = min(raw_s, rest_s + found_s)
        return raw_s

    def _in_order_s(
        self, snapshot: QueueSnapshot, num_prompt_tokens: int, turns: _CellTurns
    ) -> float | None:
        """Predicts the time to the first token in the order of arrival; None: requests are not
        served in that order now."""
        if not snapshot.is_calm:
            return None
        num_more, more_tokens = self._since(snapshot.cell, turns, math.inf)
        return snapshot.in_order_s(
            num_prompt_tokens * snapshot.uncached,
            num_more=num_more,
            num_more_tokens=more_tokens * snapshot.uncached,
        )

    def _by_key_s(
        self,
        snapshot: QueueSnapshot,
        service: Service,
        num_prompt_tokens: int,
        priority: int,
        turns: _CellTurns,
    ) -> float:
        """Predicts the time to the first token from a request's place in the queue by its key."""
        keys_at = self._keys_at(snapshot, service, num_prompt_tokens, priority)
        num_more, more_tokens = self._since(snapshot.cell, turns, float(keys_at(_NOW)[0]))
        return snapshot.first_token_s(
            num_prompt_tokens * snapshot.uncached,
            keys_at,
            num_more=num_more,
            num_more_tokens=more_tokens * snapshot.uncached,
        )

    @property
    def _open_snapshots(self) -> Mapping[int, QueueSnapshot]:
        """The snapshots of the engines that take requests; of all, if none does."""
        closed, engines, all_of_them = self._closed, self._closed_engines, self._snapshots
        return {
            k: each
            for k, each in all_of_them.items()
            if each.cell not in closed and k not in engines
        } or all_of_them

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
        snapshots = [*self._open_snapshots.values()]
        turns = _CellTurns.of(snapshots)
        while self._accepted and turns.include(self._accepted[0]):
            self._accepted.popleft()
        snapshot = next(iter(snapshots), QueueSnapshot())
        key = float(self._keys_at(snapshot, service, num_prompt_tokens, priority)(_NOW)[0])
        life = _LIFE * max(1, len(turns.num_engines))
        self._accepted.append(_Accepted(turns.last + life - 1, num_prompt_tokens, key, raw_s))
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

    def entered(self, turn: int, num_prompt_tokens: int, cell: int = 0) -> float | None:
        """Notes that a request has reached an engine of a cell in a turn, so that the cell's next
        snapshot includes it. Returns its forecast without correction, or None if it was not
        accepted here or long ago.
        """
        for each in tuple(self._accepted):
            if each.cell is None and each.num_tokens == num_prompt_tokens:
                each.cell, each.turn = cell, turn
                return each.raw_s
        return None

    def slack_s(self, service: Service, priority: int) -> float:
        """Returns the seconds from the arrival to the virtual deadline."""
        target_s = _first_target_s(service)
        if target_s is None:
            target_s = self._default_s
        return target_s + self._priority_s * priority

    def _since(self, cell: int, turns: _CellTurns, key: float) -> tuple[float, float]:
        """Returns the number of requests that go before a key and that the snapshots of a cell
        lack, and their tokens. Each counts with the probability that it has come, or will come, to
        one engine of the cell."""
        count = tokens = 0.0
        for each in tuple(self._accepted):
            if each.key <= key and each.cell in (None, cell) and not turns.include(each):
                share = turns.share(each)
                count += share
                tokens += share * each.num_tokens
        return count, tokens


def _refusal(raw_s: float, factor: float, target_s: float) -> Refusal:
    """Builds the refusal. It names the time after which the target could be met: the queue
    becomes shorter by a second in each second.
    """
    return Refusal(
        predicted_ttft_s=raw_s * factor,
        target_ttft_s=target_s,
        retry_after_s=max(LEAST_RETRY_S, raw_s - target_s / factor),
    )


def _first_target_s(service: Service) -> float | None:
    """Returns the target of the first token, or else that of the whole answer, which is certainly
    missed if the first token is late.
    """
    targets = service.targets
    return targets.ttft_s if targets.ttft_s is not None else targets.e2e_s
