"""The coordinator's end of one rank's control connection: what it says becomes events."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.messages import Examined, Heartbeat, Hello, Order, Report
from moe_serve.errors import ChannelClosedError

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
_RECEIVE_S = 3600.0
_UNKNOWN_NS = 1 << 62
_ONE_CLOCK_NS = 20_000_000  # no two hosts' clocks since boot are so near


@dataclass(frozen=True, slots=True)
class Gone:
    """The rank cannot be reached any more. `start`: which of its processes, if that told it."""

    why: str
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank said, or that it is gone. `link` tells a restarted rank from the one before."""

    name: str
    link: RankLink | None
    report: Report | Gone


Inbox = queue.SimpleQueue[Event]


class RankLink:
    """Reads on a thread of its own. Heartbeats stop here, everything else goes to the inbox."""

    def __init__(
        self, channel: Channel[Any], inbox: Inbox, on_sign: Callable[[RankLink], None]
    ) -> None:
        self._channel, self._inbox, self._on_sign = channel, inbox, on_sign
        self.name = ""
        self.step = -1  # the last one that it said it began
        self.operation, self.operation_s = "", 0.0  # what it was at when its last beat came
        self.last_beat = time.monotonic()
        self.hello: Hello | None = None
        self._behind_ns = _UNKNOWN_NS  # our clock less the rank's when its beat came, at least
        self._num_told = 0  # malformed frames that the log has
        threading.Thread(target=self._read, name="rank-link", daemon=True).start()

    @property
    def clock_offset_ns(self) -> int:
        """The rank's clock plus this is ours, but for the shortest way of a message. 0 on one host,
        where both are the same clock, and as long as no beat has come."""
        is_known = self._behind_ns < _UNKNOWN_NS and abs(self._behind_ns) >= _ONE_CLOCK_NS
        return self._behind_ns if is_known else 0

    @property
    def num_malformed(self) -> int:
        return self._channel.num_malformed

    def send(self, order: Order) -> None:
        """Raises ChannelClosedError; the reader tells the same as an event."""
        self._channel.send(order)

    def close(self) -> None:
        self._channel.close()

    def _note_malformed(self) -> None:
        if self.num_malformed > self._num_told:
            self._num_told = self.num_malformed
            _log.warning(
                "%s sent frames that are no messages: %d dropped so far", self.name, self._num_told
            )

    def _read(self) -> None:
        try:
            first = self._channel.receive(HELLO_TIMEOUT_S)
            if not isinstance(first, Hello):
                return  # whoever it is, it is not one of ours
            self.name, self.hello = first.name, first
            self._inbox.put(Event(self.name, self, first))
            while True:
                report = self._channel.receive(_RECEIVE_S)
                self._note_malformed()
                if report is None:
                    continue
                if not isinstance(report, Examined):  # it beats from its configuration on
                    self._on_sign(self)
                if isinstance(report, Heartbeat):
                    self.step, self.last_beat = report.step, time.monotonic()
                    self.operation, self.operation_s = report.operation, report.operation_s
                    behind_ns = time.perf_counter_ns() - report.clock_ns
                    self._behind_ns = min(self._behind_ns, behind_ns)
                else:
                    self._inbox.put(Event(self.name, self, report))
        except ChannelClosedError as error:
            if self.name:
                self._inbox.put(Event(self.name, self, Gone(str(error))))
        finally:
            self._channel.close()
