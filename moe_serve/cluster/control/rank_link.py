"""The coordinator's end of one rank's control connection; turns the rank's messages into events."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_serve.cluster.control.adapter_messages import AdapterLoaded
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.messages import Examined, Heartbeat, Hello, Order, Report
from moe_serve.cluster.control.parcel_messages import ParcelReport
from moe_serve.errors import ChannelClosedError

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
_RECEIVE_S = 3600.0
_UNKNOWN_NS = 1 << 62
_ONE_CLOCK_NS = 20_000_000  # the clocks of two hosts, counted from boot, differ by more


@dataclass(frozen=True, slots=True)
class Gone:
    """The rank can no longer be reached. `start`: the number of its process, if known."""

    why: str
    start: int | None = None


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """A message of a rank, or the news that it is gone. `link` tells a restarted rank from its
    predecessor."""

    name: str
    link: RankLink | None
    report: Report | Gone


Inbox = queue.SimpleQueue[LinkEvent]


class RankLink:
    """Reads messages on its own thread. It handles heartbeats, passes reports on adapters to their
    listener, and puts all other messages into the inbox.
    """

    def __init__(
        self,
        channel: Channel[Any],
        inbox: Inbox,
        on_sign: Callable[[RankLink], None],
        on_parcel: Callable[[LinkEvent], None] | None = None,
        on_adapter: Callable[[RankLink, AdapterLoaded], None] = lambda link, report: None,
    ) -> None:
        """`on_parcel` and `on_adapter` get the rank's reports on these instead of the inbox."""
        self._on_adapter = on_adapter
        self._channel, self._inbox, self._on_sign = channel, inbox, on_sign
        self._on_parcel = inbox.put if on_parcel is None else on_parcel
        self.name = ""
        self.step = -1  # the last one begun, by its heartbeats
        self.operation, self.operation_s = "", 0.0  # as of its last heartbeat
        self.last_beat = time.monotonic()
        self.hello: Hello | None = None
        self._behind_ns = _UNKNOWN_NS  # least (our clock - the rank's) at a heartbeat
        self._num_told = 0  # malformed frames already logged
        threading.Thread(target=self._read, name="rank-link", daemon=True).start()

    @property
    def clock_offset_ns(self) -> int:
        """Returns the offset that turns the rank's clock into ours, up to a message's shortest
        latency.

        It is 0 on one host, where both read the same clock, and until the first heartbeat.
        """
        is_known = self._behind_ns < _UNKNOWN_NS and abs(self._behind_ns) >= _ONE_CLOCK_NS
        return self._behind_ns if is_known else 0

    @property
    def num_malformed(self) -> int:
        return self._channel.num_malformed

    def send(self, order: Order) -> None:
        """Sends an order; raises ChannelClosedError, which the reader also reports as an event."""
        self._channel.send(order)

    @property
    def is_closed(self) -> bool:
        """Returns True if the rank can no longer be reached."""
        return self._channel.is_closed

    def close(self) -> None:
        self._channel.close()

    def _note_malformed(self) -> None:
        if self.num_malformed > self._num_told:
            self._num_told = self.num_malformed
            _log.warning(
                "%s sent frames that are not valid messages: %d dropped so far",
                self.name,
                self._num_told,
            )

    def _read(self) -> None:
        try:
            first = self._channel.receive(HELLO_TIMEOUT_S)
            if not isinstance(first, Hello):
                return  # not a rank of this cluster
            self.name, self.hello = first.name, first
            self._inbox.put(LinkEvent(self.name, self, first))
            while True:
                report = self._channel.receive(_RECEIVE_S)
                self._note_malformed()
                if report is None:
                    continue
                if not isinstance(report, Examined):  # heartbeats begin once it is configured
                    self._on_sign(self)
                if isinstance(report, Heartbeat):
                    self.step, self.last_beat = report.step, time.monotonic()
                    self.operation, self.operation_s = report.operation, report.operation_s
                    behind_ns = time.perf_counter_ns() - report.clock_ns
                    self._behind_ns = min(self._behind_ns, behind_ns)
                elif isinstance(report, AdapterLoaded):
                    self._on_adapter(self, report)
                elif isinstance(report, ParcelReport):
                    self._on_parcel(LinkEvent(self.name, self, report))
                else:
                    self._inbox.put(LinkEvent(self.name, self, report))
        except ChannelClosedError as error:
            if self.name:
                self._inbox.put(LinkEvent(self.name, self, Gone(str(error))))
        finally:
            self._channel.close()
