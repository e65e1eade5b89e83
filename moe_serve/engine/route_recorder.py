"""The listener that writes what routers choose into a recording: of some requests, every token."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from moe_serve.engine.route_records import RouteRecord
from moe_serve.engine.sequence import Sequence
from routing_predictor.recording import TracedTokens

_MAX_OPEN = 2**16  # requests whose last position is remembered


class TokenSink(Protocol):
    """What takes the tokens: a `RecordingWriter`, or a list in memory."""

    def add(self, tokens: TracedTokens) -> None: ...


class RouteRecorder:
    """Implements RouteListener. Takes a share of the requests, and each of those from its first
    computed token to its last; which ones follows from their ids."""

    def __init__(
        self,
        sink: TokenSink,
        sample_rate: float,
        *,
        has_weights: bool,
        label_of: Callable[[str], str] = lambda request_id: "",
    ) -> None:
        self._sink, self._has_weights, self._label_of = sink, has_weights, label_of
        self._bound = round(sample_rate * 2**32)
        self._lock, self._is_over = threading.Lock(), False
        self._next: OrderedDict[str, int] = OrderedDict()  # request -> position not yet recorded

    @property
    def has_weights(self) -> bool:
        return self._has_weights

    def wants(self, step: int, sequences: Mapping[int, Sequence]) -> list[int]:
        """See `RouteListener.wants`."""
        return [key for key, s in sequences.items() if self._is_sampled(s.request.request_id)]

    def take(self, records: list[RouteRecord]) -> None:
        """What was told before (of a request that was preempted or moved) is left out."""
        with self._lock:
            for record in [] if self._is_over else records:
                if self._is_sampled(record.request_id):
                    self._take(record)

    def end(self) -> None:
        """From here on the sink gets nothing, also of a step that is told about just now."""
        with self._lock:
            self._is_over = True

    def _take(self, record: RouteRecord) -> None:
        end = record.start + len(record.token_ids_N)
        known = max(0, self._next.get(record.request_id, 0) - record.start)
        if end <= record.start + known:
            return
        self._next[record.request_id] = end
        self._next.move_to_end(record.request_id)
        if len(self._next) > _MAX_OPEN:
            self._next.popitem(last=False)
        weights = record.weights_NLK if self._has_weights else None
        self._sink.add(
            TracedTokens(
                request_id=record.request_id,
                start=record.start + known,
                num_prompt_tokens=record.num_prompt_tokens,
                expert_ids_NLK=record.expert_ids_NLK[known:],
                token_ids_N=record.token_ids_N[known:],
                weights_NLK=None if weights is None else weights[known:],
                label=self._label_of(record.request_id),
            )
        )

    def _is_sampled(self, request_id: str) -> bool:
        return zlib.crc32(request_id.encode()) < self._bound
