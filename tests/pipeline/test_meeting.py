"""Strangers at a meeting: every user of the host can see and reach the members' abstract names."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest

from moe_serve.pipeline.meeting import (
    _GREETING,
    Whereabouts,
    _accept,
    _greeted,
    _listen,
    _whereabouts,
)


class Told:
    """A store in which somebody has told something, and nobody called the meeting off."""

    def __init__(self, value: bytes = b"") -> None:
        self._value = value

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def get(self, key: str) -> bytes:
        return self._value

    def check(self, keys: list[str]) -> bool:
        return False


MINE = Whereabouts("host", "", b"0123456789abcdef")


def test_nobody_waits_for_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        there.sendall(_GREETING.pack(3, MINE.token))
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert _greeted(here, MINE) is None
        monkeypatch.undo()
        assert _greeted(here, MINE) == 3, "not even read before"


def test_a_wrong_token_is_no_member() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        there.sendall(_GREETING.pack(3, bytes(16)))
        assert _greeted(here, MINE) is None


def test_a_crowd_of_strangers_does_not_keep_a_meeting_open() -> None:
    """It ends at its deadline, also if there is always somebody to turn away."""
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(5)]
    with _listen() as listening:
        for stranger in strangers:
            stranger.connect(listening.getsockname())
            stranger.close()
        with pytest.raises(TimeoutError):
            _accept(listening, MINE, {1}, time.monotonic() - 1, Told())
        listening.setblocking(False)
        connection, _ = listening.accept()  # it did not stay until all were turned away
        connection.close()


@pytest.mark.parametrize("told", [b"nonsense", b"\xff", b"\x93\x01\x02\x03"])
def test_nonsense_in_the_store_fails_the_meeting_and_not_the_rank(told: bytes) -> None:
    with pytest.raises(OSError, match="member 0 tells nonsense"):
        _whereabouts(Told(told), 0, time.monotonic() + 5)
