"""Ranks as threads that die, raise or freeze at a chosen point of the code."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from moe_serve.cluster.control.byte_stream import frame
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.messages import Heartbeat
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.ranks.shard_parcels import TAKES_PARCELS
from moe_serve.errors import ChannelClosedError
from tests.support.cluster.thread_starter import ThreadStarter

_FREEZE_LIMIT_S = 100.0
_CHANNELS: dict[str, Channel[Any]] = {}  # of ranks, by the names of their threads


class KilledError(BaseException):
    """Ends a rank's thread as SIGKILL ends a process: nothing is said, connections close."""


class Faults:
    """What happens to which rank where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._frozen: set[int] = set()  # threads
        self.thawed = threading.Event()
        self.num_frozen = 0
        self.happened: list[str] = []

    def at(
        self,
        owner: Any,
        function: str,
        act: Callable[[], None],
        *,
        rank: str,
        time: int | None = 1,
    ) -> None:
        """Calls `act` when the rank enters the function for the n-th time, on its thread or on the
        one that takes parcels; with None, each time."""
        original, calls = getattr(owner, function), Counter[str]()

        def entered(*arguments: Any, **named: Any) -> Any:
            name = threading.current_thread().name.removesuffix(TAKES_PARCELS)
            calls[name] += 1
            if name == rank and (time is None or calls[name] == time):
                self.happened.append(f"{name}: {function}")
                act()
            return original(*arguments, **named)

        self._monkeypatch.setattr(owner, function, entered)

    def die(self) -> None:
        name = threading.current_thread().name
        if name.endswith(TAKES_PARCELS):  # a signal would end the whole process
            _CHANNELS[name.removesuffix(TAKES_PARCELS)].close()
            raise ChannelClosedError("killed")
        raise KilledError

    def fail(self) -> None:
        raise RuntimeError("injected")

    def freeze(self) -> None:
        """Freezes the rank until it is thawed; it sends nothing meanwhile."""
        thread = threading.get_ident()
        self._frozen.add(thread)
        self.num_frozen += 1
        assert self.thawed.wait(_FREEZE_LIMIT_S), "nobody thaws it"
        self._frozen.discard(thread)

    def is_frozen(self, thread: int) -> bool:
        return thread in self._frozen


class FaultStarter(ThreadStarter):
    """`can_kill` False: a rank that is given up goes on living, unreached by any signal. `prefix`:
    before the names by which faults know the ranks, where there are several cells."""

    can_kill, prefix = True, ""

    def __init__(
        self,
        faults: Faults,
        host: str,
        port: int,
        secret: ClusterSecret,
        num_threads: int,
    ) -> None:
        super().__init__(host, port, secret, num_threads)
        self._faults = faults

    def kill(self, rank: RankName) -> None:
        if self.can_kill:
            super().kill(rank)

    def crash(self, name: str) -> None:
        """Closes the rank's connection at once."""
        self._channels[name].close()

    def garble(self, name: str, data: bytes) -> None:
        """Sends `data`, which need not be a frame, on the rank's control connection."""
        channel = self._channels[name]
        with channel._send_lock:
            channel._socket.sendall(data)

    def _live(self, rank: RankName, channel: Channel[Any]) -> None:
        thread, send = threading.get_ident(), channel.send
        name = threading.current_thread().name = f"{self.prefix}{rank}"
        _CHANNELS[name] = channel

        def send_if_awake(message: Any) -> None:
            if not (isinstance(message, Heartbeat) and self._faults.is_frozen(thread)):
                send(message)

        channel.send = send_if_awake  # type: ignore[method-assign]
        try:
            super()._live(rank, channel)
        except KilledError:
            channel.close()


def no_message() -> bytes:
    """Sends a complete frame whose payload is not a message of the union."""
    return frame(b"\xc1 not a message")
