"""Only the bytes that were written prove a slot."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from moe_serve.cache.tiers.slot import ALIGNMENT, HEADER_BYTES, SlotHeader, slot_bytes

SECRET = b"s" * 32
PAYLOAD = bytes(range(256)) * 3
HEADER = SlotHeader(
    num_tokens=16,
    generation=2**64 - 1,
    key=b"k" * 32,
    parent_key=b"p" * 32,
    geometry=b"g" * 32,
    num_bytes=len(PAYLOAD),
    digest=sha256(PAYLOAD).digest(),
    written_at=1.5,
    expires_at=2.5e9,
)


def test_a_header_returns_as_it_was() -> None:
    data = HEADER.pack(SECRET)
    assert len(data) == HEADER_BYTES <= ALIGNMENT
    assert SlotHeader.unpack(data, SECRET) == HEADER
    assert SlotHeader.unpack(data.ljust(ALIGNMENT, b"\0"), SECRET) == HEADER
    assert HEADER.proves(memoryview(PAYLOAD))


@pytest.mark.parametrize("index", range(HEADER_BYTES))
def test_a_flipped_bit_proves_nothing(index: int) -> None:
    data = bytearray(HEADER.pack(SECRET))
    data[index] ^= 1 << index % 8
    assert SlotHeader.unpack(bytes(data), SECRET) is None


def test_another_secret_or_a_part_proves_nothing() -> None:
    data = HEADER.pack(SECRET)
    assert SlotHeader.unpack(data, b"t" * 32) is None
    assert SlotHeader.unpack(data[:-1], SECRET) is None
    assert SlotHeader.unpack(b"", SECRET) is None


def test_another_payload_is_refused() -> None:
    assert not HEADER.proves(memoryview(PAYLOAD[:-1]))
    assert not HEADER.proves(memoryview(PAYLOAD[:-1] + b"\0"))
    assert replace(HEADER, num_bytes=0, digest=sha256(b"").digest()).proves(memoryview(b""))


def test_slots_begin_at_whole_blocks() -> None:
    assert [slot_bytes(size) for size in (1, 4096, 4097)] == [8192, 8192, 12288]
