"""Writes the routers' choices for sampled requests into a recording, with every token of each."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.routes.route_records import RouteRecord
from routing_predictor.traces.recording import TracedTokens

_MAX_KNOWN = 2**16  # remembered requests: more than run at a time


class TokenSink(Protocol):
    """Receives the tokens: a `RecordingWriter`, or a list in memory."""

    def add(self, tokens: Sequence[TracedTokens]) -> None: ...


class RouteRecorder:
    """Implements RouteListener. Records a share of the requests, chosen by their ids, each from its
    first computed token to its last."""

    def __init__(self, sink: TokenSink, sample_rate: float, *, has_weights: bool) -> None:
        self._sink, self._has_weights = sink, has_weights
        self._bound = round(sample_rate * 2**32)
        self._lock, self._is_over = threading.Lock(), False
        self._next: dict[str, int] = {}  # request -> first position not recorded yet;
        # -1: not sampled. Oldest first.

    @property
    def has_weights(self) -> bool:
        return self._has_weights

    def wants(self, step: int, sequences: Mapping[int, EngineSequence]) -> list[int]:
        """See `RouteListener.wants`."""
        wanted, known = [], self._next
        for key, sequence in sequences.items():
            request_id = sequence.request.request_id
            place = known.get(request_id)
            if (self._next_of(request_id) if place is None else place) >= 0:
                wanted.append(key)
        return wanted

    def take(self, records: list[RouteRecord]) -> None:
        """Records the new tokens. Leaves out tokens of a preempted or moved request that it has
        already recorded."""
        with self._lock:
            if self._is_over:
                return
            taken = []
            for record in records:
                start = record.start
                known = self._next_of(record.request_id)
                end = start + len(record.token_ids_N)
                if 0 <= known < end:
                    self._next[record.request_id] = end
                    taken.append(record if known <= start else _behind(record, known - start))
            if len(taken) < len(records):
                taken = [_behind(record, 0) for record in taken]  # copies, to free the other rows
            self._sink.add(taken)

    def end(self) -> None:
        """Stops passing tokens to the sink, also those of the step being published."""
        with self._lock:
            self._is_over = True

    def _next_of(self, request_id: str) -> int:
        known = self._next.get(request_id)
        if known is None:
            known = 0 if zlib.crc32(request_id.encode()) < self._bound else -1
            if len(self._next) >= _MAX_KNOWN:
                del self._next[next(iter(self._next))]
            self._next[request_id] = known
        return known


def _behind(record: RouteRecord, count: int) -> RouteRecord:
    """Copies a record without its first `count` tokens."""
    weights = record.weights_NLK
    return msgspec.structs.replace(
        record,
        start=record.start + count,
        token_ids_N=record.token_ids_N[count:].copy(),
        expert_ids_NLK=record.expert_ids_NLK[count:].copy(),
        weights_NLK=None if weights is None else weights[count:].copy(),
    )
