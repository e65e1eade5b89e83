"""Lets the members of an epoch find each other, and connects those of one host by Unix sockets."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch.distributed.distributed_c10d import PrefixStore

_OFF_KEY = "off"  # never set: waiting for it fails once the meeting was called off
_LOOK_S = 0.1  # seconds between two checks whether the meeting was called off
_FULL_S = 0.001  # seconds between two tries while a queue is full
_GREETING = struct.Struct("<I16s")  # index, token
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """The addresses that a member publishes.

    An empty `unix_name` means that it cannot share memory.
    """

    host_key: str
    unix_name: str
    token: bytes
    gpu: str = ""  # the GPU it computes on, if NCCL may be used


def host_key() -> str:
    """Returns a key that is equal for processes that can share memory and Unix sockets: same boot,
    same network, same user.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        network = os.stat("/proc/self/ns/net").st_ino
        user = os.getuid()
    except (OSError, AttributeError):
        return secrets.token_hex(16)  # differs from all others, so nothing is shared
    return f"{boot}/{network}/{user}"


@dataclass(frozen=True, slots=True)
class Met:
    """The whereabouts of all members, and the connections to those on this host, by index."""

    everybody: Mapping[int, Whereabouts]
    local: Mapping[int, socket.socket]

    @property
    def is_gpu_each(self) -> bool:
        """True if every member has its own GPU: NCCL refuses to share one."""
        gpus = [w.gpu for w in self.everybody.values()]
        return all(gpus) and len(set(gpus)) == len(gpus)

    @property
    def is_one_host(self) -> bool:
        return len({w.host_key for w in self.everybody.values()}) == 1


class StoreOfMembers(Protocol):
    """The store in which members of epochs find each other,
    as seen by the process that serves it.
    """

    @property
    def port(self) -> int: ...

    def call_off(self, prefix: str) -> None:
        """Makes every request for a key with this prefix fail, including requests that wait now."""
        ...

    def forget(self, prefix: str) -> None:
        """Drops the keys with this prefix."""
        ...

    def close(self) -> None: ...


class MeetingPlace:
    """The coordinator's view of the place where members of an epoch meet. It never waits there."""

    def __init__(self, store: StoreOfMembers, host: str) -> None:
        self._store, self.host = store, host

    @property
    def port(self) -> int:
        return self._store.port

    def call_off(self, epoch: int) -> None:
        """Cancels a meeting because a member is missing: the members that wait leave at once."""
        self._store.call_off(f"{epoch_prefix(epoch)}/")

    def forget(self, epoch: int) -> None:
        """Drops an epoch's keys once its meeting is over."""
        self._store.forget(f"{epoch_prefix(epoch)}/")

    def close(self) -> None:
        self._store.close()


def epoch_prefix(epoch: int) -> str:
    """Returns the prefix of an epoch's keys."""
    return f"data-{epoch}"


def meeting_store(store: Any, epoch: int) -> Any:
    """Returns the part of a store in which an epoch's members meet."""
    return PrefixStore("meeting", PrefixStore(epoch_prefix(epoch), store))


def meet(
    store: Any,
    me: int,
    num_members: int,
    peers: Sequence[int],
    timeout_s: float,
    share: bool,
    gpu: str = "",
) -> Met:
    """Exchanges whereabouts and connects to peers on this host; the member with the lower index
    connects.

    Raises RuntimeError (torch's, from the store) or OSError if a member does not arrive in time.
    """
    deadline = time.monotonic() + timeout_s
    can_share = share and hasattr(os, "memfd_create")
    listening = _listen() if can_share else None
    try:
        mine = Whereabouts(
            host_key() if can_share else secrets.token_hex(16),
            listening.getsockname()[1:].decode() if listening is not None else "",
            secrets.token_bytes(16),
            gpu,
        )
        store.set(str(me), msgspec.msgpack.encode(mine))
        everybody = {i: _whereabouts(store, i, deadline) for i in range(num_members)}
        local: dict[int, socket.socket] = {}
        if listening is not None:
            near = [i for i in peers if everybody[i].host_key == mine.host_key]
            for index in (i for i in near if i > me):
                local[index] = _connect(everybody[index], me, deadline)
            expected = {i for i in near if i < me}
            local |= _accept(listening, mine, expected, deadline, store)
        return Met(everybody, local)
    finally:
        if listening is not None:
            listening.close()


def _whereabouts(store: Any, index: int, deadline: float) -> Whereabouts:
    """Waits for a member's whereabouts and returns them."""
    store.wait([str(index)], timedelta(seconds=max(0.01, deadline - time.monotonic())))
    told = store.get(str(index))
    try:
        return msgspec.msgpack.decode(told, type=Whereabouts)
    except (msgspec.MsgspecError, ValueError) as error:  # a faulty member
        raise ConnectionError(f"member {index} published an invalid address: {error}") from error


def _listen() -> socket.socket:
    """Listens on an abstract name: it leaves no file, and other network namespaces do not see
    it."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0moe-serve-{secrets.token_hex(16)}")
    listening.listen(256)
    return listening


def _connect(peer: Whereabouts, me: int, deadline: float) -> socket.socket:
    """Connects to a peer and sends it its token; raises OSError.

    Another user may have taken the name after the peer left: that user gets no token. Another user
    may also fill the peer's queue with connections, which the peer refuses one by one.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            remaining_s = deadline - time.monotonic()
            connection.settimeout(max(0.01, remaining_s))
            try:
                connection.connect(f"\0{peer.unix_name}")
                break
            except BlockingIOError:  # the queue is full
                if remaining_s <= 0:
                    raise TimeoutError("a member's connection queue stayed full") from None
                time.sleep(_FULL_S)
        if not _is_our_user(connection):
            raise ConnectionRefusedError("another user listens under a member's name")
        connection.sendall(_GREETING.pack(me, peer.token))
    except BaseException:
        connection.close()
        raise
    return connection


def _is_our_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to our user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    return bool(user == os.getuid())


def _accept(
    listening: socket.socket, mine: Whereabouts, expected: set[int], deadline: float, store: Any
) -> dict[int, socket.socket]:
    """Accepts the connections of the expected members and refuses all others."""
    found: dict[int, socket.socket] = {}
    while expected - found.keys():
        remaining_s = deadline - time.monotonic()
        listening.settimeout(min(_LOOK_S, max(0.01, remaining_s)))
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            if remaining_s <= _LOOK_S or store.check([_OFF_KEY]):
                raise
            continue
        if remaining_s <= 0:  # unknown processes may connect again and again
            connection.close()
            raise TimeoutError(f"{len(expected - found.keys())} members did not connect")
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        index = _greeted(connection, mine)
        if index is None or index not in expected or index in found:
            connection.close()
        else:
            found[index] = connection
    return found


def _greeted(connection: socket.socket, mine: Whereabouts) -> int | None:
    """Returns the index of a connected member that has our user and our token, or None.

    It never waits for data of another user: every process on the host can see and reach an abstract
    name.
    """
    if not _is_our_user(connection):
        return None
    try:
        data = connection.recv(_GREETING.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(data) < _GREETING.size:
        return None
    index, token = _GREETING.unpack(data)
    return int(index) if secrets.compare_digest(token, mine.token) else None
