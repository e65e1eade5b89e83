"""The layout of a control message in the byte stream: 8 bytes of header, then its msgpack.

0      3         4             8
| MSC  | version | length u32  | payload, `length` bytes ...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

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
                raise BrokenStreamError(f"a frame that starts with {bytes(magic)!r}")
            if length > self._max_frame_bytes:
                raise BrokenStreamError(
                    f"a frame of {length} bytes, the limit is {self._max_frame_bytes}"
                )
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:  # one copy, not two
                payload = bytes(view[_HEADER.size : end])
            del self._buffer[:end]
            yield payload
