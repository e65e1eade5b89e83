"""Transfers between ranks of one host: frames in shared memory, notices on a Unix socket.

gloo moves bytes on a thread of its own, which competes with the kernels for the rank's core, and
spins while the main thread holds a connection's lock: with a core for each rank, sends took
milliseconds (docs/internals/disaggregation.md). Here the main thread does everything. A sender
copies its frame into memory that both sides have mapped and writes a notice of 24 bytes; a waiting
receiver sleeps in poll(), and the kernel wakes it. Memory is anonymous (memfd) and its descriptor
travels with the notice, so nothing is left behind when a process is killed.

A slot is reused without a handshake: a rank that sends rows gets an answer before the next rows of
the same micro-batch. Frames without rows are not answered, so short frames travel in the socket
itself.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.rank_lanes import (
    INLINE,
    NEW,
    NOTICE,
    SHORT_BYTES,
    SLOTS,
    Lane,
    LaneMessage,
    LaneStatus,
    StepEnd,
)
from moe_serve.pipeline.links.transfer import PeerLostError, Transfer

Bytes = NDArray[np.uint8]

_MIN_BYTES = 1 << 16
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(SLOTS * struct.calcsize("i"))


@dataclass(frozen=True, slots=True)
class _Sent:
    """Implements Transfer: the frame was copied, so its buffer is free."""

    def wait(self) -> None:
        return


@dataclass(slots=True)
class _Awaited:
    """Implements Transfer for a receive."""

    link: SharedLink
    buffer: Tensor
    tag: int
    operation: object

    def wait(self) -> None:
        self.link.take(self.tag, self.buffer, self.operation)


class SharedLink:
    """Implements Link over a connected Unix socket.

    `delay_s` is added to each message's travel time, for measurements: the receiver does not see a
    message earlier.
    """

    def __init__(
        self, peer: str, connection: socket.socket, timeout_s: float, delay_s: float = 0.0
    ) -> None:
        connection.setblocking(False)
        self._peer, self._socket = peer, connection
        self._timeout_s, self._delay_s = timeout_s, delay_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._out: dict[int, Bytes] = {}  # by slot
        self._in: dict[int, Bytes] = {}
        # By tag: the message, and when it was sent. Frames without rows may come from a step ahead.
        self._arrived: dict[int, deque[tuple[Bytes, float]]] = {}
        self._rest, self._descriptors = b"", list[int]()
        self._lane: Lane | None = None  # the link for native code
        self._is_mapped = False  # `_lane` has the memory of all slots

    def send(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """See `Link.send`. Returns once the frame is copied."""
        content = buffer.numpy()
        slot, size, now = tag % SLOTS, len(content), time.monotonic()
        if size <= SHORT_BYTES:
            notice = NOTICE.pack(tag, slot | INLINE, size, now)
            self._notify(notice + content.tobytes(), [], operation)
            return _Sent()
        memory, new = self._out.get(slot), list[int]()
        if memory is None or len(memory) < size:
            capacity = max(_MIN_BYTES, 1 << (size - 1).bit_length())
            descriptor = os.memfd_create("moe-serve-frame")
            os.ftruncate(descriptor, capacity)
            memory = self._out[slot] = _mapped(descriptor, capacity)
            new, self._is_mapped = [descriptor], False
        memory[:size] = content
        try:
            notice = NOTICE.pack(tag, slot | (NEW if new else 0), size, now)
            self._notify(notice, new, operation)
        finally:
            for descriptor in new:
                os.close(descriptor)
        return _Sent()

    def _notify(self, notice: bytes, descriptors: list[int], operation: object) -> None:
        """Writes a notice. The socket holds hundreds of them.

        A peer that gets no rows does not answer, so the sender may be that many notices ahead of
        it.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [notice], descriptors)
                else:
                    self._socket.send(notice)  # a message this short is sent whole or not at all
                return
            except BlockingIOError:
                self._wait_for_room(deadline, operation)
            except OSError as error:
                raise PeerLostError(self._peer, operation, error.strerror or str(error)) from None

    def _wait_for_room(self, deadline: float, operation: object) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        remaining_ms = (deadline - time.monotonic()) * 1000
        if remaining_ms <= 0 or not poll.poll(remaining_ms):
            why = f"it has not read for {self._timeout_s:g} s"
            raise PeerLostError(self._peer, operation, why)

    def receive(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """See `Link.receive`."""
        return _Awaited(self, buffer, tag, operation)

    def take(self, tag: int, buffer: Tensor, operation: object) -> None:
        """Waits for a message and copies it out."""
        deadline = time.monotonic() + self._timeout_s
        while tag not in self._arrived:
            self._read(deadline, operation)
        waiting = self._arrived[tag]
        content, sent = waiting.popleft()
        if not waiting:
            del self._arrived[tag]
        if self._delay_s:
            time.sleep(max(0.0, sent + self._delay_s - time.monotonic()))
        size, whole = len(content), buffer.numpy()
        if size > len(whole):
            why = f"{size} bytes arrived, more than the {len(whole)} expected"
            raise PeerLostError(self._peer, operation, why)
        whole[:size] = content

    def lend(self, make_lane: Callable[[int, float], Lane]) -> Lane | None:
        """Lends the link to native code until `take_back`. None: it cannot be lent now, and nothing
        was done."""
        if self._delay_s or self._rest or self._descriptors:
            return None
        if self._lane is None:
            self._lane = make_lane(self._socket.fileno(), self._timeout_s)
        if not self._is_mapped:
            for slot, memory in self._out.items():
                self._lane.map_out(slot, memory.ctypes.data, len(memory))
            for slot, memory in self._in.items():
                self._lane.map_in(slot, memory.ctypes.data)
            self._is_mapped = True
        if self._arrived:
            if not self._lane.load([_message(*each) for each in self._waiting()]):
                return None
            self._arrived.clear()
        return self._lane

    def _waiting(self) -> Iterator[tuple[int, Bytes, float]]:
        for tag, waiting in self._arrived.items():
            for content, sent in waiting:
                yield tag, content, sent

    def take_back(self) -> float:
        """Takes back messages that native code has read and not used. Returns its waiting time in
        seconds."""
        assert self._lane is not None, "the link was lent"
        rest = self._lane.take()
        self._rest, self._descriptors = rest.unread, [*rest.descriptors]
        for each in rest.messages:
            self._note(each.tag, each.slot, each.size, each.sent, each.content)
        return rest.waited_s

    def lost(self, end: StepEnd, operation: object) -> PeerLostError:
        """Returns the reason why native code lost the peer."""
        if end.status is LaneStatus.CLOSED:
            return PeerLostError(self._peer, operation, "the peer closed the connection")
        if end.status is LaneStatus.SILENT:
            return PeerLostError(self._peer, operation, f"silent for {self._timeout_s:g} s")
        return PeerLostError(self._peer, operation, os.strerror(end.error))

    def has_message(self, timeout_s: float) -> bool:
        """Waits for a message or for the peer's end; returns False after the time-out."""
        return bool(self._arrived) or bool(self._poll.poll(timeout_s * 1000))

    def forget(self, is_stale: Callable[[int], bool]) -> None:
        """Drops received messages whose tags will never be read."""
        for tag in [tag for tag in self._arrived if is_stale(tag)]:
            del self._arrived[tag]

    def close(self) -> None:
        """Closes the link, which wakes a peer that waits."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _read(self, deadline: float, operation: object) -> None:
        """Reads the notices that have arrived; waits for one if there are none."""
        remaining_ms = (deadline - time.monotonic()) * 1000
        if remaining_ms <= 0 or not self._poll.poll(remaining_ms):
            raise PeerLostError(self._peer, operation, f"silent for {self._timeout_s:g} s")
        try:
            data, attached, _, _ = self._socket.recvmsg(64 * NOTICE.size, _DESCRIPTORS_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLostError(self._peer, operation, error.strerror or str(error)) from None
        for level, kind, packed in attached:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors += memoryview(packed[: len(packed) // 4 * 4]).cast("i")
        if not data:
            raise PeerLostError(self._peer, operation, "the peer closed the connection")
        self._rest += data
        start = 0
        while len(self._rest) - start >= NOTICE.size:
            tag, slot, size, sent = NOTICE.unpack_from(self._rest, start)
            end = start + NOTICE.size + (size if slot & INLINE else 0)
            if end > len(self._rest):
                break
            self._note(tag, slot, size, sent, self._rest[start + NOTICE.size : end])
            start = end
        self._rest = self._rest[start:]

    def _note(self, tag: int, slot: int, size: int, sent: float, inline: bytes) -> None:
        if slot & INLINE:
            content = np.frombuffer(inline, np.uint8)
        else:
            if slot & NEW:
                descriptor = self._descriptors.pop(0)
                memory = _mapped(descriptor, os.fstat(descriptor).st_size)
                self._in[slot % SLOTS], self._is_mapped = memory, False
                os.close(descriptor)
            content = self._in[slot % SLOTS][:size]
        self._arrived.setdefault(tag, deque()).append((content, sent))


def _mapped(descriptor: int, capacity: int) -> Bytes:
    """Maps shared memory; it is unmapped when the array is freed."""
    return np.frombuffer(mmap.mmap(descriptor, capacity), np.uint8)


def _message(tag: int, content: Bytes, sent: float) -> LaneMessage:
    is_short = len(content) <= SHORT_BYTES
    flags = INLINE if is_short else 0
    return LaneMessage(
        tag, tag % SLOTS | flags, len(content), sent, content.tobytes() if is_short else b""
    )
