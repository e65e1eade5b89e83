"""One file of page slots on a disk.

    file   | head, 4 KiB | slot 0 | slot 1 | ... | footer |

The file gets its full size when it is made, so a full disk shows then. Slots are written in order
and never again. A *sealed* file has a footer that lists its slots, so that a start need not read
them all. Head and footer carry an HMAC, as slots do.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.tiers.slot import ALIGNMENT, HEADER_BYTES, SlotHeader, StoredPage

SUFFIX = ".kv"
_HEAD = struct.Struct("<8sIIQ")  # magic, version, slots, bytes of a slot
_MAGIC = b"moe-seg\n"
_FOOTER_MAGIC = b"moe-foot"
_VERSION = 1
_MAC_BYTES = 32
_KEY_BYTES = 32
ENTRY = np.dtype(  # one slot as the index knows it; packed, as it is in a footer
    [("slot", "<u4"), ("generation", "<u8"), ("key", "V32"), ("expires_at", "<f8")]
)
_FOOTER_HEAD = struct.Struct("<8sQ")


def segment_bytes(num_slots: int, slot_bytes: int) -> int:
    """Returns the size of a file with so many slots."""
    footer = _FOOTER_HEAD.size + num_slots * ENTRY.itemsize + _MAC_BYTES
    return ALIGNMENT + num_slots * slot_bytes + -(-footer // ALIGNMENT) * ALIGNMENT


class Segment:
    """An open file of slots. One thread writes; any thread may read slots that are written."""

    def __init__(self, path: Path, descriptor: int, num_slots: int, slot_bytes: int) -> None:
        self.path, self.num_slots, self.slot_bytes = path, num_slots, slot_bytes
        self.number = int(path.stem)
        self.num_bytes = segment_bytes(num_slots, slot_bytes)
        self.num_written = 0  # slots
        self.is_sealed = False
        self.keys = bytearray(_KEY_BYTES * num_slots)
        self.generations = array("Q", bytes(8 * num_slots))
        self.is_known = bytearray(num_slots)  # slots that the index has
        self.was_used = bytearray(num_slots)  # slots that were read since they were written
        self._descriptor = descriptor

    @classmethod
    def make(cls, path: Path, num_slots: int, slot_bytes: int, secret: bytes) -> Segment:
        """Makes a file of full size. Raises OSError, and then leaves no file."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            size = segment_bytes(num_slots, slot_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
            head = _HEAD.pack(_MAGIC, _VERSION, num_slots, slot_bytes)
            os.pwrite(descriptor, head + hmac.digest(secret, head, "sha256"), 0)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return cls(path, descriptor, num_slots, slot_bytes)

    @classmethod
    def open(cls, path: Path, slot_bytes: int, secret: bytes) -> Segment | None:
        """Opens a file. Returns None if its head does not prove slots of this size. Raises
        OSError.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        head = _read_head(descriptor, secret)
        if head is None or head[1] != slot_bytes:
            os.close(descriptor)
            return None
        return cls(path, descriptor, head[0], slot_bytes)

    @property
    def footer_bytes(self) -> int:
        return self.num_bytes - self._offset(self.num_slots)

    @property
    def is_full(self) -> bool:
        return self.num_written == self.num_slots

    def key(self, slot: int) -> bytes:
        """Returns the key of the page in a slot that was written."""
        return bytes(self.keys[slot * _KEY_BYTES : (slot + 1) * _KEY_BYTES])

    def write(self, page: StoredPage, secret: bytes) -> int:
        """Writes the next slot and returns its number. Raises OSError."""
        slot = self.num_written
        head = (page.header.pack(secret) + page.seal).ljust(ALIGNMENT, b"\0")
        written = os.pwritev(self._descriptor, [head, page.payload.data], self._offset(slot))
        if written != ALIGNMENT + len(page.payload):
            raise OSError(f"{self.path} took {written} of {ALIGNMENT + len(page.payload)} bytes")
        self.generations[slot] = page.header.generation
        self.keys[slot * _KEY_BYTES : (slot + 1) * _KEY_BYTES] = page.header.key
        self.num_written += 1
        return slot

    def read(self, slot: int, into: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Returns a slot's bytes, header included, [slot_bytes], in new memory or in that of the
        caller. Raises OSError.
        """
        data = np.empty(self.slot_bytes, dtype=np.uint8) if into is None else into
        count = os.preadv(self._descriptor, [data.data], self._offset(slot))
        return data[:count]

    def seal(self, secret: bytes) -> None:
        """Writes the footer, and waits until the disk has everything. Raises OSError."""
        entries = self._entries_of_headers(secret)
        footer = _FOOTER_HEAD.pack(_FOOTER_MAGIC, len(entries)) + entries.tobytes()
        footer += hmac.digest(secret, footer, "sha256")
        os.pwrite(self._descriptor, footer, self._offset(self.num_slots))
        self.sync()
        self.is_sealed = True

    def sync(self) -> None:
        """Waits until the disk has everything. Raises OSError."""
        os.fsync(self._descriptor)

    def entries(self, secret: bytes) -> NDArray[np.void]:
        """Reads the slots from the footer, or else from the slots' headers: `ENTRY`, [slots that
        have a page]. Raises OSError."""
        sealed = self._footer(secret)
        found = self._entries_of_headers(secret) if sealed is None else sealed
        self.is_sealed = sealed is not None
        last = int(found["slot"].max()) if len(found) else -1
        self.num_written = self.num_slots if self.is_sealed else last + 1
        np.frombuffer(self.generations, dtype=np.uint64)[found["slot"]] = found["generation"]
        np.frombuffer(self.keys, dtype=ENTRY["key"])[found["slot"]] = found["key"]
        return found

    def headers(self, secret: bytes) -> Iterator[tuple[int, SlotHeader]]:
        """Yields the proven headers with their slots. Raises OSError."""
        for slot in range(self.num_slots):
            data = os.pread(self._descriptor, HEADER_BYTES, self._offset(slot))
            header = SlotHeader.unpack(data, secret)
            if header is not None:
                yield slot, header

    def close(self) -> None:
        """Closes the file. It cannot be read afterwards."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def delete(self) -> None:
        """Removes the file. Reads in progress still finish."""
        self.path.unlink(missing_ok=True)

    def __del__(self) -> None:
        self.close()

    def _offset(self, slot: int) -> int:
        return ALIGNMENT + slot * self.slot_bytes

    def _entries_of_headers(self, secret: bytes) -> NDArray[np.void]:
        rows = [(slot, h.generation, h.key, h.expires_at) for slot, h in self.headers(secret)]
        return np.array(rows, dtype=ENTRY)

    def _footer(self, secret: bytes) -> NDArray[np.void] | None:
        offset = self._offset(self.num_slots)
        data = os.pread(self._descriptor, self.num_bytes - offset, offset)
        if len(data) < _FOOTER_HEAD.size:
            return None
        magic, count = _FOOTER_HEAD.unpack_from(data)
        end = _FOOTER_HEAD.size + count * ENTRY.itemsize
        if magic != _FOOTER_MAGIC or count > self.num_slots:
            return None
        mac = data[end : end + _MAC_BYTES]
        if not hmac.compare_digest(mac, hmac.digest(secret, data[:end], "sha256")):
            return None
        entries = np.frombuffer(data, dtype=ENTRY, count=count, offset=_FOOTER_HEAD.size)
        return entries if (entries["slot"] < self.num_slots).all() else None


def slot_size(path: Path, secret: bytes) -> int | None:
    """Returns the bytes of a slot in a file; None if its head proves nothing. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        head = _read_head(descriptor, secret)
    finally:
        os.close(descriptor)
    return None if head is None else head[1]


def _read_head(descriptor: int, secret: bytes) -> tuple[int, int] | None:
    """Returns the slots of a file and the bytes of one; None if its head proves nothing."""
    head = os.pread(descriptor, _HEAD.size + _MAC_BYTES, 0)
    fields, mac = head[: _HEAD.size], head[_HEAD.size :]
    if not hmac.compare_digest(mac, hmac.digest(secret, fields, "sha256")):
        return None
    magic, version, num_slots, slot_bytes = _HEAD.unpack(fields)
    return (num_slots, slot_bytes) if (magic, version) == (_MAGIC, _VERSION) else None
