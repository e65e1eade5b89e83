"""A link with a slow reader: frames without rows are not answered, so they may pile up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from moe_serve.pipeline.links.shared_link import SharedLink
from moe_serve.pipeline.links.transfer import PeerLostError

TAG, COUNT = 16, 2000


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield near, far
    near.close()
    far.close()


def frame(number: int) -> torch.Tensor:
    return torch.tensor([number // 256, number % 256] + [0] * 62, dtype=torch.uint8)


def test_who_is_far_ahead_waits(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, behind = (SharedLink("peer", each, 60.0) for each in sockets)
    wait, is_waiting = ahead._wait_for_room, threading.Event()

    def noted(deadline: float, operation: object) -> None:
        is_waiting.set()
        wait(deadline, operation)

    monkeypatch.setattr(ahead, "_wait_for_room", noted)
    failures: list[PeerLostError] = []

    def send() -> None:
        try:
            for number in range(COUNT):
                ahead.send(frame(number), TAG, "dispatch").wait()
        except PeerLostError as error:
            failures.append(error)
            is_waiting.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert is_waiting.wait(60.0), "the socket holds them all"
    buffer = torch.empty(64, dtype=torch.uint8)
    for number in range(COUNT):
        assert not failures, failures
        behind.receive(buffer, TAG, "dispatch").wait()
        assert torch.equal(buffer, frame(number))
    thread.join(60.0)
    assert not thread.is_alive() and not failures


def test_who_never_reads_is_lost(sockets: tuple[socket.socket, socket.socket]) -> None:
    link = SharedLink("expert-1", sockets[0], 0.05)
    with pytest.raises(PeerLostError, match=r"expert-1 is lost \(dispatch\): it has not read for"):
        for number in range(COUNT):
            link.send(frame(number), TAG, "dispatch")
