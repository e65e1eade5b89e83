"""Counts the experts that the routers chose in the last minute, from a sample of the steps.

A busy server counts one step in four, and at most twenty a second; after a pause the next step is
counted. The dashboards need no exact counts: they show shares of experts, and the number of
different experts that a step activates.

N rows of a step, L layers with routed experts, K choices, E experts.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord

WINDOW_S = 60
INTERVAL_S = 0.05  # minimum between two counted steps
STRIDE = 4  # steps from one counted step to the next, unless after a pause
PAUSE_S = 1.0
_MOST_OPEN = 3  # counted steps whose choices have not arrived: one, one ahead, one spare

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCounts:
    """The choices in the counted steps. A row of an expert is one choice of it."""

    rows_LE: Counts
    num_tokens: int
    num_steps: int
    activated_L: Counts  # different experts of a step, summed over the steps

    @property
    def activated_mean(self) -> NDArray[np.float64] | None:
        """[L]: number of different experts that a step activates; None if no step was counted."""
        return self.activated_L / self.num_steps if self.num_steps else None

    def plus(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(
            rows_LE=self.rows_LE + other.rows_LE,
            num_tokens=self.num_tokens + other.num_tokens,
            num_steps=self.num_steps + other.num_steps,
            activated_L=self.activated_L + other.activated_L,
        )


@dataclass(slots=True)
class _OpenStep:
    """A counted step, until the choices of all its sequences have arrived."""

    rows_LE: Counts
    num_tokens: int = 0
    asked: set[int] = field(default_factory=set)


class ExpertLoad:
    """Implements RouteListener for all engines of a server. May be read on any thread."""

    has_weights = False

    def __init__(
        self,
        layers: Items[int],
        num_experts: int,
        top_k: int,
        *,
        interval_s: float = INTERVAL_S,
        stride: int = STRIDE,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`layers` are the numbers of the model's layers with routed experts."""
        self.layers, self.num_experts, self.top_k = tuple(layers), num_experts, top_k
        self.interval_s, self.stride, self._clock = interval_s, stride, clock
        self._offsets_L1 = np.arange(len(self.layers))[:, None] * num_experts
        self._lock = threading.Lock()  # guards the seconds and the total
        self._seconds: deque[tuple[int, ExpertCounts]] = deque()
        self._total = self._none()
        self._open: dict[int, _OpenStep] = {}  # by number, the oldest first
        self._judged, self._is_counted = -1, False  # the last step passed to `wants`
        self._last_step, self._last = 0, -math.inf  # the last counted step and its time

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """See `RouteListener.wants`. Wants all sequences of a step, or none."""
        if step != self._judged:
            now = self._clock()
            self._judged, self._is_counted = step, self._is_due(step, now - self._last)
            if self._is_counted:
                self._last_step, self._last = step, now
                self._open[step] = _OpenStep(self._none().rows_LE)
                if len(self._open) > _MOST_OPEN:  # some of its sequences have ended
                    self._close(next(iter(self._open)))
        opened = self._open.get(step)
        if not self._is_counted or opened is None:
            return ()
        opened.asked.update(sequences)
        return sequences.keys()

    def take(self, records: list[RouteRecord]) -> None:
        """See `RouteListener.take`. Records that only other listeners wanted are ignored, as they
        would give some requests more weight."""
        for step, opened in list(self._open.items()):
            own = [record for record in records if record.sequence_id in opened.asked]
            if not own:
                continue
            ids_NLK = np.concatenate([record.expert_ids_NLK for record in own])
            counts = self._count(ids_NLK)
            if counts is not None:
                opened.rows_LE += counts
                opened.num_tokens += len(ids_NLK)
            opened.asked.difference_update(record.sequence_id for record in own)
            if not opened.asked:
                self._close(step)
            return

    def look(self) -> ExpertCounts:
        """Returns the counts of the last minute."""
        with self._lock:
            self._drop_old()
            window = [counts for _, counts in self._seconds]
        rows_LE, activated_L = self._none().rows_LE, self._none().activated_L
        for counts in window:
            rows_LE += counts.rows_LE
            activated_L += counts.activated_L
        return ExpertCounts(
            rows_LE=rows_LE,
            num_tokens=sum(counts.num_tokens for counts in window),
            num_steps=sum(counts.num_steps for counts in window),
            activated_L=activated_L,
        )

    @property
    def total(self) -> ExpertCounts:
        """The counts since the start."""
        return self._total

    def _is_due(self, step: int, since_s: float) -> bool:
        if since_s >= max(PAUSE_S, self.interval_s):
            return True
        return since_s >= self.interval_s and step >= self._last_step + self.stride

    def _count(self, ids_NLK: NDArray[np.integer]) -> Counts | None:
        """Returns counts [L, E]; None if a rank sent other layers or experts than the model has."""
        if ids_NLK.shape[1] != self.num_layers:
            return None
        size = self.num_layers * self.num_experts
        flat = np.bincount((ids_NLK + self._offsets_L1).ravel(), minlength=size)
        return flat.reshape(self.num_layers, -1) if len(flat) == size else None

    def _close(self, step: int) -> None:
        opened = self._open.pop(step)
        if not opened.num_tokens:
            return
        counted = ExpertCounts(
            rows_LE=opened.rows_LE,
            num_tokens=opened.num_tokens,
            num_steps=1,
            activated_L=np.count_nonzero(opened.rows_LE, axis=1),
        )
        second = int(self._clock())
        with self._lock:
            self._total = self._total.plus(counted)
            if self._seconds and self._seconds[-1][0] == second:
                counted = self._seconds.pop()[1].plus(counted)
            self._seconds.append((second, counted))
            self._drop_old()

    def _drop_old(self) -> None:
        oldest = int(self._clock()) - WINDOW_S
        while self._seconds and self._seconds[0][0] <= oldest:
            self._seconds.popleft()

    def _none(self) -> ExpertCounts:
        return ExpertCounts(
            rows_LE=np.zeros((self.num_layers, self.num_experts), dtype=np.int64),
            num_tokens=0,
            num_steps=0,
            activated_L=np.zeros(self.num_layers, dtype=np.int64),
        )
