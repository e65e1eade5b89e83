"""Records events of the server as sentences and keeps the latest 200."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_EVENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. `kind` comes from a closed set; `text` is one sentence."""

    seq: int  # the first event has 1
    time: float  # seconds since 1970
    kind: str
    text: str


class EventLog:
    """A log of events. Any thread may add and read."""

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
        """The events after `seq`, oldest first. All events if `seq` comes from an earlier server
        run."""
        with self._lock:
            events, newest = list(self._events), self._num_events
        return [event for event in events if event.seq > seq or seq > newest]
