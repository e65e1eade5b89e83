"""The header of a parcel between two hosts. It describes the pages that follow, and is checked
before they are read.

    magic, version | pages | bytes of a page | ticket | identity of the pages | checksum

The pages follow, one after the other. The receiver answers with one byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"moe-page"
VERSION = 1
_FIELDS = struct.Struct(">8sHIQQ32sI")
HEADER_BYTES = _FIELDS.size
TAKEN, REFUSED = b"\x01", b"\x00"  # the answers


class ParcelError(Exception):
    """A parcel that cannot be received. The text is the end of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParcelHeader:
    """The header. `identity` is a digest of everything that makes pages exchangeable: the weights,
    how they are computed, and the geometry of pages.
    """

    num_pages: int
    page_bytes: int
    ticket: int
    identity: bytes  # 32
    checksum: int

    def pack(self) -> bytes:
        return _FIELDS.pack(
            MAGIC,
            VERSION,
            self.num_pages,
            self.page_bytes,
            self.ticket,
            self.identity,
            self.checksum,
        )

    @classmethod
    def unpack(cls, data: bytes) -> ParcelHeader:
        """Raises ParcelError for bytes that are no header of this version."""
        magic, version, num_pages, page_bytes, ticket, identity, checksum = _FIELDS.unpack(data)
        if magic != MAGIC:
            raise ParcelError(f"it begins with {magic!r} and is not a parcel")
        if version != VERSION:
            raise ParcelError(f"it has version {version}, but this rank reads version {VERSION}")
        return cls(
            num_pages=num_pages,
            page_bytes=page_bytes,
            ticket=ticket,
            identity=identity,
            checksum=checksum,
        )

    def check(self, identity: bytes, page_bytes: int, num_pages: int) -> None:
        """Raises ParcelError, with both values, if this is not the expected parcel."""
        for name, got, wanted in (
            ("the identity of its pages", self.identity.hex()[:12], identity.hex()[:12]),
            ("the size of its pages", self.page_bytes, page_bytes),
            ("their number", self.num_pages, num_pages),
        ):
            if got != wanted:
                raise ParcelError(f"{name} is {got}, but {wanted} is expected")
