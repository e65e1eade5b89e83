"""Strangers at a meeting: every user of the host can see and reach the members' abstract names."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from torch.distributed import FileStore

from moe_serve.pipeline.meeting import (
    _GREETING,
    Whereabouts,
    _accept,
    _greeted,
    _listen,
    _whereabouts,
)

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


def test_a_crowd_of_strangers_does_not_keep_a_meeting_open(tmp_path: Path) -> None:
    """It ends at its deadline, also if there is always somebody to turn away."""
    store = FileStore(str(tmp_path / "store"), 1)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(5)]
    with _listen() as listening:
        for stranger in strangers:
            stranger.connect(listening.getsockname())
            stranger.close()
        with pytest.raises(TimeoutError):
            _accept(listening, MINE, {1}, time.monotonic() - 1, store)
        listening.setblocking(False)
        connection, _ = listening.accept()  # it did not stay until all were turned away
        connection.close()


@pytest.mark.parametrize("told", [b"nonsense", b"\xff", b"\x93\x01\x02\x03"])
def test_nonsense_in_the_store_fails_the_meeting_and_not_the_rank(
    told: bytes, tmp_path: Path
) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    store.set("0", told)
    with pytest.raises(OSError, match="member 0 tells nonsense"):
        _whereabouts(store, 0, time.monotonic() + 5)
