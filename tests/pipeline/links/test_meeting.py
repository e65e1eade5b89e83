"""Foreign processes at a meeting: every user of the host can see and reach the abstract names."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from moe_serve.pipeline.links.meeting import (
    _GREETING,
    Met,
    Whereabouts,
    _accept,
    _connect,
    _greeted,
    _listen,
    _whereabouts,
    meet,
)

# Becomes another user and fills the queue of every member's name that the host shows.
FLOOD = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print("go", flush=True)
held = []
while True:
    for line in open("/proc/net/unix"):
        name = line.split()[-1]
        if not name.startswith("@moe-serve-"):
            continue
        try:
            while True:
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stranger.setblocking(False)
                stranger.connect("\\0" + name[1:])
                held = [*held[-200:], stranger]
        except OSError:
            stranger.close()
"""


class Told:
    """A store that holds one value and no other key, so that no meeting is called off."""

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


def test_a_name_that_another_user_has_taken_gets_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with _listen() as listening:
        peer = Whereabouts("host", listening.getsockname()[1:].decode(), MINE.token)
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(ConnectionRefusedError, match="another user listens under a member"):
            _connect(peer, 0, time.monotonic() + 5)
        monkeypatch.undo()
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(64) == b"", "it was told something"


def test_a_full_queue_is_waited_for() -> None:
    """A member connects as soon as its peer has refused one foreign process."""
    with contextlib.ExitStack() as strangers, _listen() as listening:
        listening.listen(1)
        with contextlib.suppress(BlockingIOError):
            for _ in range(8):
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
                stranger.setblocking(False)
                stranger.connect(listening.getsockname())
        peer = Whereabouts("host", listening.getsockname()[1:].decode(), MINE.token)
        with pytest.raises(TimeoutError, match="connection queue stayed full"):
            _connect(peer, 0, time.monotonic() + 0.05)
        late = threading.Timer(0.05, lambda: listening.accept()[0].close())
        late.start()
        _connect(peer, 0, time.monotonic() + 30).close()
        late.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_that_floods_the_members_names_stops_no_meeting() -> None:
    store, met = HashStore(), dict[int, Met]()
    flood = subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None and flood.stdout.readline() == b"go\n"

        def come(me: int) -> None:
            met[me] = meet(store, me, 3, [i for i in range(3) if i != me], 60, share=True)

        members = [threading.Thread(target=come, args=(me,)) for me in range(3)]
        for thread in members[1:]:
            thread.start()
        time.sleep(0.3)  # they wait for the last member, and do not look at their queues
        members[0].start()
        for thread in members:
            thread.join(60)
        assert flood.poll() is None, "it does not flood"
        assert {me: set(found.local) for me, found in met.items()} == {
            me: {0, 1, 2} - {me} for me in range(3)
        }
    finally:
        flood.kill()
        flood.communicate()
        for found in met.values():
            for connection in found.local.values():
                connection.close()


def test_a_crowd_of_strangers_does_not_keep_a_meeting_open() -> None:
    """A meeting ends at its deadline even if foreign processes keep connecting."""
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
    with pytest.raises(OSError, match="member 0 published an invalid address"):
        _whereabouts(Told(told), 0, time.monotonic() + 5)
