"""Two ends of a control connection over a real loopback socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import msgspec

from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.listener import Listener
from moe_serve.cluster.control.secret import ClusterSecret, new_secret


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str
    numbers: list[int] = []


Message = Ping | Text


def decoder() -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(Message)


class Cluster:
    """A listener, and the channels it has handed over."""

    def __init__(self, **limits: float) -> None:
        self.secret = new_secret()
        self.accepted: SimpleQueue[Channel[Message]] = SimpleQueue()
        self._channels: list[Channel[Message]] = []
        self.listener: Listener[Message] = Listener(
            "127.0.0.1", 0, self.secret, decoder(), self.accepted.put, **limits
        )

    def connect(self, secret: ClusterSecret | None = None) -> Channel[Message]:
        port = self.listener.port
        channel = connect("127.0.0.1", port, secret or self.secret, decoder(), 60)
        self._channels.append(channel)
        return channel

    def pair(self) -> tuple[Channel[Message], Channel[Message]]:
        """Returns the connecting end and the accepting end."""
        near = self.connect()
        far = self.accepted.get(timeout=60)
        self._channels.append(far)
        return near, far

    def close(self) -> None:
        self.listener.close()
        while not self.accepted.empty():
            self._channels.append(self.accepted.get())
        for channel in self._channels:
            channel.close()


@contextmanager
def open_cluster(**limits: float) -> Iterator[Cluster]:
    cluster = Cluster(**limits)
    try:
        yield cluster
    finally:
        cluster.close()
