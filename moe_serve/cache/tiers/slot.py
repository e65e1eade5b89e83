"""The layout of one page on a disk: a header that proves the page, and the page's bytes.

    slot     | header, seal; 4 KiB | payload, filled up to the next 4 KiB |

The header names the page by its key and holds the SHA-256 of the payload. An HMAC with the
folder's secret key proves the header. A write that was torn or lost therefore reads as "no page",
and so does a slot that another program wrote. Neither token ids nor salts are on the disk. An
encrypted page has its nonce and tag in the seal, a keyed name instead of its key, and the digest of
the encrypted bytes.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096
_MAGIC = b"moe-kv\r\n"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQ32s32s32sQ32sdd")
_MAC_BYTES = 32
HEADER_BYTES = _FIELDS.size + _MAC_BYTES
_SEAL_BYTES = 28  # nonce and tag; zeros if the payload is not encrypted
_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """Describes the page in a slot. Times are seconds since 1970."""

    num_tokens: int
    generation: int  # random: two writes to one slot never have the same
    key: bytes
    parent_key: bytes
    geometry: bytes  # digest of the shapes of a page's tensors
    num_bytes: int  # of the payload
    digest: bytes  # SHA-256 of the payload
    written_at: float
    expires_at: float

    def pack(self, secret: bytes) -> bytes:
        """Returns the header's bytes with their HMAC, [HEADER_BYTES]."""
        fields = self._fields(self.digest)
        return fields + hmac.digest(secret, fields, "sha256")

    @property
    def context(self) -> bytes:
        """The fields that an encrypted payload is bound to: all but its digest."""
        return self._fields(_NO_DIGEST)

    def _fields(self, digest: bytes) -> bytes:
        return _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.num_tokens,
            self.generation,
            self.key,
            self.parent_key,
            self.geometry,
            self.num_bytes,
            digest,
            self.written_at,
            self.expires_at,
        )

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> SlotHeader | None:
        """Returns the header in the first bytes of a slot; None if they do not prove one."""
        fields, mac = data[: _FIELDS.size], data[_FIELDS.size : HEADER_BYTES]
        if len(mac) != _MAC_BYTES or not hmac.compare_digest(
            mac, hmac.digest(secret, fields, "sha256")
        ):
            return None
        magic, version, tokens, generation, key, parent, geometry, size, digest, at, until = (
            _FIELDS.unpack(fields)
        )
        if magic != _MAGIC or version != _VERSION:
            return None
        return cls(
            num_tokens=tokens,
            generation=generation,
            key=key,
            parent_key=parent,
            geometry=geometry,
            num_bytes=size,
            digest=digest,
            written_at=at,
            expires_at=until,
        )

    def proves(self, payload: memoryview) -> bool:
        """Returns whether the payload is the one that was written."""
        return len(payload) == self.num_bytes and sha256(payload).digest() == self.digest


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page as it is on the disk: encrypted if the tier is."""

    header: SlotHeader
    payload: NDArray[np.uint8]
    seal: bytes = b""

    @classmethod
    def of(cls, slot: NDArray[np.uint8], secret: bytes) -> StoredPage | None:
        """Returns the page in a slot's bytes; None if they do not prove one."""
        header = SlotHeader.unpack(slot[:HEADER_BYTES].tobytes(), secret)
        if header is None:
            return None
        payload = slot[ALIGNMENT : ALIGNMENT + header.num_bytes]
        if not header.proves(payload.data):
            return None
        seal = slot[HEADER_BYTES : HEADER_BYTES + _SEAL_BYTES].tobytes()
        return cls(header, payload, seal)


def slot_bytes(payload_bytes: int) -> int:
    """Returns the size of a slot for payloads of this size."""
    return ALIGNMENT + -(-payload_bytes // ALIGNMENT) * ALIGNMENT
