"""Publishes the changes of one rank's prefix cache over ZeroMQ, on its own thread.

Sequence numbers begin at the time of the start in microseconds, so that they also grow from one
start of a server to the next. A subscriber that missed the restart therefore sees an ordinary gap,
asks for the missing batches, and gets them from the empty cache on.

A request for batches that are no longer kept is answered with the whole cache in one batch, so a
subscriber that comes late knows all pages, too.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_serve.cache.events.change_record import ChangeRecord, Changes, PublishedPage, update
from moe_serve.cache.events.endpoints import EventAddress
from moe_serve.cache.events.event_encoder import EventEncoder
from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    import zmq

_log = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)  # behind the last batch of a replay
_LINGER_MS = 500  # how long the last batches may take when the server ends
_MAX_REQUEST_BYTES = 1024
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherLimits:
    """The batches that a publisher keeps, and how often running requests give it their pages."""

    buffer_steps: int  # batches, for replays
    hwm: int  # batches, for a slow subscriber
    give_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStats:
    """Counts of publishers since the start."""

    num_batches: int = 0
    num_stored: int = 0  # pages
    num_removed: int = 0  # pages
    num_cleared: int = 0
    num_replays: int = 0  # answered requests for past batches

    def __add__(self, other: EventStats) -> EventStats:
        return EventStats(
            num_batches=self.num_batches + other.num_batches,
            num_stored=self.num_stored + other.num_stored,
            num_removed=self.num_removed + other.num_removed,
            num_cleared=self.num_cleared + other.num_cleared,
            num_replays=self.num_replays + other.num_replays,
        )


class EventPublisher:
    """Sends the changes that `record` collects. Opens its sockets at once. `close` reports an empty
    cache and ends the thread.
    """

    def __init__(
        self,
        encoder: EventEncoder,
        endpoint: EventAddress,
        replay: EventAddress | None,
        topic: str,
        limits: PublisherLimits,
    ) -> None:
        """Raises ConfigError if an address cannot be used."""
        self._encoder, self._topic = encoder, topic.encode()
        self.stats = EventStats()
        self._pages: dict[bytes, PublishedPage] = {}  # as subscribers know them
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=limits.buffer_steps)
        self._sequence = time.time_ns() // 1000
        self._is_closing = False
        self._pub, self._router = _open_sockets(endpoint, replay, limits)
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self.record = ChangeRecord(self._wake, self.close, give_after_s=limits.give_after_s)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells subscribers that the cache is empty, and ends the thread. May be called again."""
        if not self._is_closing:
            self.record.cleared()
            self._is_closing = True
            self._wake()
            self._thread.join(_JOIN_S)

    def _wake(self) -> None:
        """Makes the thread look at the record. If the pair is full, it will do so anyway."""
        with contextlib.suppress(OSError):  # BlockingIOError: full; others: closed
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            self._publish()
            self._serve()
        except Exception:
            _log.exception("KV events are no longer published")
        finally:
            self._is_closing = True
            _close(self._pub, self._router, linger_ms=_LINGER_MS)
            self._waker.close()
            self._woken.close()

    def _serve(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                self._woken.recv(65536)
                self._publish()
            if self._router in ready:
                self._answer(self._router)
        self._publish()

    def _publish(self) -> None:
        changes = self.record.take()
        if changes is None:
            return
        payload = self._encoder.batch(changes, time.time())
        update(self._pages, changes)
        self.stats += EventStats(
            num_batches=1,
            num_stored=len(changes.stored),
            num_removed=len(changes.removed),
            num_cleared=int(changes.is_cleared),
        )
        self._sent.append((self._sequence, payload))
        self._pub.send_multipart([self._topic, self._sequence.to_bytes(8, "big"), payload])
        self._sequence += 1

    def _answer(self, router: Any) -> None:
        """Answers one request: the batches from a sequence number on, and an end marker."""
        client, *frames = router.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            _log.debug("a request for past KV events has %d frames and is ignored", len(frames))
            return
        for sequence, payload in self._since(int.from_bytes(frames[1], "big")):
            router.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
        router.send_multipart([client, b"", _END, b""])
        self.stats += EventStats(num_replays=1)

    def _since(self, first: int) -> list[tuple[int, bytes]]:
        """Returns the batches from number `first` on. If some of them are gone, one batch with the
        whole cache replaces all of them.
        """
        sent = self._sent
        is_complete = len(sent) < (sent.maxlen or 0) or first >= sent[0][0]
        if is_complete:
            return [batch for batch in sent if batch[0] >= first]
        whole = Changes(True, (), tuple(self._pages.values()))
        return [(sent[-1][0], self._encoder.batch(whole, time.time()))]


def _open_sockets(
    endpoint: EventAddress, replay: EventAddress | None, limits: PublisherLimits
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]:
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    pub = context.socket(zmq.PUB)
    pub.set_hwm(limits.hwm)
    pub.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)  # of what subscribers send
    router = None
    try:
        _attach(pub, "kv_events.endpoint", endpoint)
        if replay is not None:
            router = context.socket(zmq.ROUTER)
            router.set(zmq.SNDHWM, limits.buffer_steps + 16)  # a whole answer fits
            router.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            _attach(router, "kv_events.replay_endpoint", replay)
    except BaseException:
        _close(pub, router, linger_ms=0)
        raise
    return pub, router


def _close(*ends: zmq.Socket[bytes] | None, linger_ms: int) -> None:
    for end in ends:
        if end is not None:
            end.close(linger=linger_ms)


def _attach(end: zmq.Socket[bytes], key: str, endpoint: EventAddress) -> None:
    import zmq

    end.set(zmq.IPV6, int("[" in endpoint.address))
    try:
        (end.bind if endpoint.is_bound else end.connect)(endpoint.address)
    except zmq.ZMQError as error:
        what = "listened on" if endpoint.is_bound else "connected to"
        raise ConfigError(
            f"{key}: {endpoint.address} cannot be {what} ({error.strerror or error}): choose "
            "another address."
        ) from None
