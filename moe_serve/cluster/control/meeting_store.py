"""The key-value store through which the ranks of a data group find each other.

gloo and NCCL exchange addresses through such a store. torch's own TCPStore accepts any connection:
every user of the host could read the ranks' messages or cancel a meeting. This store uses control
connections, so both ends prove the cluster's secret first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import msgspec
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.listener import Listener
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.errors import ChannelClosedError, ClusterError

_IDLE_S = 3600.0  # between two requests; the end of the connection wakes the server
_ANSWER_S = 5.0  # for the answer, beyond the wait that was requested


class _StoreMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encodes the fields in order, without their names."""


class Put(_StoreMessage, frozen=True):
    """Sets keys."""

    values: Mapping[str, bytes]


class Take(_StoreMessage, frozen=True):
    """Waits until all keys are set, and returns their values."""

    keys: Sequence[str]
    timeout_s: float


class Look(_StoreMessage, frozen=True):
    """Asks whether all keys are set. The answer has one value if they are, and no value
    otherwise.
    """

    keys: Sequence[str]


class Swap(_StoreMessage, frozen=True):
    """Sets a key if its value is the expected one. With an empty `expected` the key is set if it
    has no value.
    """

    key: str
    expected: bytes
    desired: bytes


class Count(_StoreMessage, frozen=True):
    """Adds to the number under a key, which begins at 0."""

    key: str
    amount: int


class Drop(_StoreMessage, frozen=True):
    """Deletes a key. The answer has one value if the key was set."""

    key: str


class StoreAnswer(_StoreMessage, frozen=True, tag="Answer"):
    """The values a request returned; `why`: the reason it failed."""

    values: Sequence[bytes] = ()
    why: str | None = None


StoreRequest = Put | Take | Look | Swap | Count | Drop
StoreMessage = StoreRequest | StoreAnswer


class StoreServer:
    """Holds the keys and values in this process, and serves each connection on its own thread.

    `timeout_s` bounds each wait, whatever the request asks for.
    """

    def __init__(self, host: str, port: int, secret: ClusterSecret, timeout_s: float) -> None:
        """Listens on the interface of `host` only; raises ConfigError."""
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards the fields below
        self._values: dict[str, bytes] = {}
        self._called_off: set[str] = set()  # key prefixes
        self._channels: set[Channel[StoreMessage]] = set()
        self._is_closed = False
        decoder: msgspec.msgpack.Decoder[StoreMessage] = msgspec.msgpack.Decoder(StoreRequest)
        self._listener = Listener(host, port, secret, decoder, self._serve)

    @property
    def port(self) -> int:
        return int(self._listener.port)

    def call_off(self, prefix: str) -> None:
        """Fails every request for a key that begins with `prefix`, waiting ones included."""
        with self._changed:
            self._called_off.add(prefix)
            self._changed.notify_all()

    def forget(self, prefix: str) -> None:
        """Deletes the keys that begin with `prefix`. No rank may ask for them any more."""
        with self._changed:
            self._called_off.discard(prefix)
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def close(self) -> None:
        """Stops listening and ends all connections."""
        with self._changed:
            self._is_closed = True
            channels, self._channels = self._channels, set()
            self._changed.notify_all()
        self._listener.close()
        for channel in channels:
            channel.close()

    def _serve(self, channel: Channel[StoreMessage]) -> None:
        """Serves one connection, on the thread of its handshake."""
        with self._changed:
            if not self._is_closed:
                self._channels.add(channel)
        try:
            while not self._is_closed:
                request = channel.receive(_IDLE_S)
                if request is not None and not isinstance(request, StoreAnswer):
                    channel.send(self._answer(request))
        except ChannelClosedError:
            pass  # the rank has ended
        finally:
            channel.close()
            with self._changed:
                self._channels.discard(channel)

    def _answer(self, request: StoreRequest) -> StoreAnswer:
        with self._changed:
            if isinstance(request, Take):
                return self._take(request)
            if (why := self._objection(_keys(request))) is not None:
                return StoreAnswer(why=why)
            if isinstance(request, Look):
                return StoreAnswer([b"1"] if self._has(request.keys) else [])
            if isinstance(request, Drop):
                return StoreAnswer([] if self._values.pop(request.key, None) is None else [b"1"])
            if isinstance(request, Put):
                self._values.update(request.values)
                given = b""
            elif isinstance(request, Swap):
                given = self._values.get(request.key, b"")
                if given == request.expected:
                    given = self._values[request.key] = request.desired
            else:
                given = b"%d" % (int(self._values.get(request.key, b"0")) + request.amount)
                self._values[request.key] = given
            self._changed.notify_all()
            return StoreAnswer([given])

    def _take(self, request: Take) -> StoreAnswer:
        wait_s = max(0.0, min(request.timeout_s, self._timeout_s))
        deadline = time.monotonic() + wait_s
        while (why := self._objection(request.keys)) is None:
            if self._has(request.keys):
                return StoreAnswer([self._values[key] for key in request.keys])
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                missing = ", ".join(key for key in request.keys if key not in self._values)
                return StoreAnswer(why=f"no rank has set {missing} within {wait_s:g} s")
            self._changed.wait(remaining_s)
        return StoreAnswer(why=why)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _objection(self, keys: Sequence[str]) -> str | None:
        if self._is_closed:
            return "the store has been closed"
        is_off = any(key.startswith(prefix) for prefix in self._called_off for key in keys)
        return "the meeting was cancelled" if is_off else None


def _keys(request: StoreRequest) -> Sequence[str]:
    if isinstance(request, Put):
        return tuple(request.values)
    return request.keys if isinstance(request, Take | Look) else (request.key,)


class RemoteStore(Store):
    """A rank's connection to the store; gloo and NCCL use it like torch's own.

    Each member of a group needs a connection of its own, because one that waits for a key blocks
    it. torch keeps only the C++ half alive, so the caller must keep the object for as long as a
    group uses it. Methods raise torch's DistStoreError.
    """

    def __init__(self, channel: Channel[StoreMessage], timeout_s: float) -> None:
        super().__init__()
        self._channel, self._timeout_s = channel, timeout_s
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._channel.is_closed

    def close(self) -> None:
        self._channel.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Put({key: _bytes(value)}))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(Take([key], self._timeout_s), self._timeout_s)[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are set."""
        wait_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._ask(Take(keys, wait_s), wait_s)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(Look(keys)))

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Count(key, value))[0])

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        swap = Swap(key, _bytes(expected_value), _bytes(desired_value))
        return bytes(self._ask(swap)[0])

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        """Deletes a key. torch requires this name."""
        return bool(self._ask(Drop(key)))

    def clone(self) -> RemoteStore:
        """Returns this store: torch asks for a copy for another thread, and this one serves any
        thread."""
        return self

    def _ask(self, request: StoreRequest, wait_s: float = 0.0) -> Sequence[bytes]:
        try:
            with self._lock:
                self._channel.send(request)
                answer = self._channel.receive(wait_s + _ANSWER_S)
        except ChannelClosedError as error:
            self._channel.close()
            raise DistStoreError(f"the connection to the store has ended: {error}") from None
        if not isinstance(answer, StoreAnswer):
            self._channel.close()  # a late answer would be taken for the next request's
            raise DistStoreError("the store does not answer")
        if answer.why is not None:
            raise DistStoreError(answer.why)
        return answer.values


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def connect_store(host: str, port: int, secret: ClusterSecret, timeout_s: float) -> RemoteStore:
    """Connects to the store; raises ClusterError after `timeout_s`, which also bounds `get` and
    `wait`."""
    decoder: msgspec.msgpack.Decoder[StoreMessage] = msgspec.msgpack.Decoder(StoreAnswer)
    try:
        return RemoteStore(connect(host, port, secret, decoder, timeout_s), timeout_s)
    except ClusterError as error:
        raise ClusterError(f"the store in which ranks meet cannot be reached: {error}") from error
