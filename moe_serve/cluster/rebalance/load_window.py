"""Counts which experts the routers chose lately, from a sample of the steps.

N tokens of a sequence, L layers with routed experts, K choices, E experts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord

STRIDE = 8  # one in STRIDE of a rank's steps is counted
_MOST_ROWS = 128  # rows counted of a step, which stand for all of its rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """Counts from one `close` to the next."""

    counts_LE: NDArray[np.float64]
    num_tokens: int  # tokens counted
    sum_log_rows: float = 0.0  # sum over the steps counted
    num_steps: int = 0

    @property
    def rows_per_step(self) -> float:
        """Returns the geometric mean of an attention rank's rows: a few long prompts should not
        outweigh many decode steps."""
        return math.exp(self.sum_log_rows / max(1, self.num_steps))


class LoadWindow:
    """Implements RouteListener; one for all engines of a server. Any thread may look and close."""

    has_weights = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self._offsets_L1 = np.arange(num_layers)[:, None] * num_experts
        self._rng = np.random.default_rng(0)  # chooses the rows that stand for others
        self._lock = threading.Lock()
        self._counts = self._none()
        self._asked: set[int] = set()  # sequences whose choices are still to come

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> Collection[int]:
        """See `RouteListener.wants`."""
        if step % STRIDE:
            return ()
        self._asked.update(sequences)
        return sequences.keys()

    def take(self, records: list[RouteRecord]) -> None:
        """See `RouteListener.take`. Records that only other listeners asked for are left out: they
        would count some requests more than others."""
        own = [record for record in records if record.sequence_id in self._asked]
        if not own:
            return
        self._asked.difference_update(record.sequence_id for record in own)
        ids_NLK = np.concatenate([record.expert_ids_NLK for record in own])
        num_rows, weight = len(ids_NLK), 1.0
        if num_rows > _MOST_ROWS:
            weight = num_rows / _MOST_ROWS
            ids_NLK = ids_NLK[self._rng.integers(num_rows, size=_MOST_ROWS)]
        flat = (ids_NLK + self._offsets_L1).ravel()
        counts = np.bincount(flat, minlength=self._shape[0] * self._shape[1])
        with self._lock:
            before = self._counts
            self._counts = WindowCounts(
                counts_LE=before.counts_LE + weight * counts.reshape(self._shape),
                num_tokens=before.num_tokens + len(ids_NLK),
                sum_log_rows=before.sum_log_rows + math.log(num_rows),
                num_steps=before.num_steps + 1,
            )

    def look(self) -> WindowCounts:
        """Returns the counts since the last `close`."""
        return self._counts

    def close(self) -> WindowCounts:
        """Returns the counts since the last `close`, and begins a new window."""
        with self._lock:
            closed, self._counts = self._counts, self._none()
        self._asked = set()  # sequences that had ended would stay for ever
        return closed

    def _none(self) -> WindowCounts:
        return WindowCounts(counts_LE=np.zeros(self._shape), num_tokens=0)
