"""What has happened to the server, in sentences: the newest two hundred."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_EVENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`kind` is a word of a closed set; `text` one sentence."""

    seq: int  # 1 is the first
    time: float  # seconds since 1970
    kind: str
    text: str


class EventLog:
    """Any thread may add and look."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0

    def add(self, kind: str, text: str) -> None:
        with self._lock:
            self._num_events += 1
            event = Event(seq=self._num_events, time=self._clock(), kind=kind, text=text)
            self._events.append(event)

    def since(self, seq: int) -> list[Event]:
        """Those after `seq`, the oldest first. All of them where `seq` is of an earlier server."""
        with self._lock:
            events, newest = list(self._events), self._num_events
        return [event for event in events if event.seq > seq or seq > newest]
