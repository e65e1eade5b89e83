"""The bytes of a control connection: both ends prove that they know the cluster secret, and then
send messages in frames.

    accepting  -> MAGIC, nonce a (32 random bytes)
    connecting -> MAGIC, nonce c, HMAC(secret, "connecting", a, c)
    accepting  -> HMAC(secret, "accepting", a, c), or 32 zeros: refused

The sizes are fixed, so an unknown peer can make this process hold 68 bytes and no more. Both nonces
are part of both proofs, so a recorded exchange is worthless against a fresh nonce. The role is part
of them too, so sending our own proof back (reflection) fails. The connecting side proves itself
first: an unknown peer gets no proof to attack. The proofs authenticate; they do not encrypt what
follows: frames of 8 bytes of header and the msgpack of one message.

    0      3         4             8
    | MSC  | version | length u32  | payload, `length` bytes ...
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Iterator

from moe_serve.cluster.control.secret import ClusterSecret

PROTOCOL_VERSION = 1
NAME = b"MSC"
MAGIC = NAME + bytes([PROTOCOL_VERSION])
MAX_FRAME_BYTES = 64 * 2**20
_HEADER = struct.Struct(">4sI")


class BrokenStreamError(Exception):
    """The stream does not hold frames. It must end: the start of the next frame is unknown."""


def frame(payload: bytes) -> bytes:
    assert len(payload) <= MAX_FRAME_BYTES, f"a control message of {len(payload)} bytes"
    return _HEADER.pack(MAGIC, len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads; holds at most one incomplete frame.

    A length above `max_frame_bytes` is refused when its header is seen, before its bytes are read.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def payloads(self) -> Iterator[bytes]:
        """Yields every complete payload; raises BrokenStreamError at the first wrong header."""
        while len(self._buffer) >= _HEADER.size:
            magic, length = _HEADER.unpack_from(self._buffer)
            if magic != MAGIC:
                raise BrokenStreamError(
                    f"a frame that starts with {bytes(magic)!r} instead of the name of "
                    "this protocol"
                )
            if length > self._max_frame_bytes:
                raise BrokenStreamError(
                    f"a frame of {length} bytes, but the limit is {self._max_frame_bytes}"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:  # one copy, not two
                payload = bytes(view[_HEADER.size : end])
            del self._buffer[:end]
            yield payload


NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


class HandshakeError(Exception):
    """The other end did not prove that it knows the secret. `reason` is one of a few fixed phrases,
    for counters.
    """

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final  # a retry cannot help


WRONG_SECRET = "the cluster secrets differ"
NOT_OURS = "not the control protocol"
TIMED_OUT = "the handshake timed out"
CLOSED = "closed during the handshake"


def accept_handshake(connection: socket.socket, secret: ClusterSecret, timeout_s: float) -> None:
    """Runs the accepting side within `timeout_s` in all; raises HandshakeError."""
    deadline = time.monotonic() + timeout_s
    ours = secrets.token_bytes(NONCE_BYTES)
    _send(connection, MAGIC + ours, deadline)
    _check_magic(_receive(connection, len(MAGIC), deadline))
    theirs = _receive(connection, NONCE_BYTES, deadline)
    proof = _receive(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, secret.proof("connecting", ours, theirs)):
        _send(connection, _REFUSED, deadline)
        raise HandshakeError(WRONG_SECRET)
    _send(connection, secret.proof("accepting", ours, theirs), deadline)


def connect_handshake(connection: socket.socket, secret: ClusterSecret, timeout_s: float) -> None:
    """Runs the connecting side within `timeout_s` in all; raises HandshakeError."""
    deadline = time.monotonic() + timeout_s
    _check_magic(_receive(connection, len(MAGIC), deadline))
    theirs = _receive(connection, NONCE_BYTES, deadline)
    ours = secrets.token_bytes(NONCE_BYTES)
    _send(connection, MAGIC + ours + secret.proof("connecting", theirs, ours), deadline)
    proof = _receive(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, secret.proof("accepting", theirs, ours)):
        raise HandshakeError(WRONG_SECRET, is_final=True)


def _check_magic(magic: bytes) -> None:
    if not magic.startswith(NAME):
        raise HandshakeError(NOT_OURS, is_final=True)
    if magic != MAGIC:
        raise HandshakeError(
            f"the peer uses version {magic[-1]} of the control protocol, but this process "
            f"uses {PROTOCOL_VERSION}",
            is_final=True,
        )


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        _limit(connection, deadline)
        try:
            piece = connection.recv(num_bytes - len(data))
        except TimeoutError as error:
            raise HandshakeError(TIMED_OUT) from error
        except OSError as error:
            raise HandshakeError(CLOSED) from error
        if not piece:
            raise HandshakeError(CLOSED)
        data += piece
    return data


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    _limit(connection, deadline)
    try:
        connection.sendall(data)
    except TimeoutError as error:
        raise HandshakeError(TIMED_OUT) from error
    except OSError as error:
        raise HandshakeError(CLOSED) from error


def _limit(connection: socket.socket, deadline: float) -> None:
    """Sets the time-out of the next socket call to the time left until the deadline."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise HandshakeError(TIMED_OUT)
    try:
        connection.settimeout(remaining_s)
    except OSError as error:  # closed meanwhile by the listener
        raise HandshakeError(CLOSED) from error
