"""The protocol of a link between two ranks of a host, shared by Python and native code.

A frame lies in the shared memory of a slot, and a notice on a socket tells the peer of it: tag,
slot with flags, size in bytes, and when it was sent. Short frames travel behind their notice. The
descriptor of new memory travels with the first notice of a frame in it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NOTICE = struct.Struct("<IIQd")  # tag, slot, size, when it was sent
SLOTS = 16  # slot = tag modulo this: 8 micro-batches, 2 directions
NEW, INLINE = 1 << 8, 1 << 9  # flags of a slot
SHORT_BYTES = 256  # the most that travels behind a notice


@dataclass(frozen=True, slots=True)
class LaneMessage:
    """A frame that has arrived: `content` of a short one; others lie in their slot."""

    tag: int
    slot: int  # with its flags
    size: int
    sent: float
    content: bytes


@dataclass(frozen=True, slots=True)
class LaneRest:
    """The messages that native code has read from a socket and not used."""

    messages: Sequence[LaneMessage]
    unread: bytes  # the beginning of a notice
    descriptors: Sequence[int]
    waited_s: float  # for messages


class Lane(Protocol):
    """The link while native code uses it."""

    def map_out(self, slot: int, address: int, size: int) -> None:
        """Sets the memory in which frames to the peer lie."""
        ...

    def map_in(self, slot: int, address: int) -> None:
        """Sets the memory in which frames of the peer lie."""
        ...

    def load(self, messages: Sequence[LaneMessage]) -> bool:
        """Adds messages that Python has read. Returns False if there are too many."""
        ...

    def take(self) -> LaneRest:
        """Empties the lane."""
        ...


class LaneStatus(enum.IntEnum):
    """The reason why native code stops: it is done, Python must continue with the next exchange, or
    a peer is lost: it was silent for too long, has closed its end, or the socket failed."""

    DONE = 0
    PYTHON = 1
    SILENT = 2
    CLOSED = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The point at which native code stopped. `done`: the number of finished exchanges. `rank`: the
    lost peer, with the number of the socket's error."""

    status: LaneStatus
    done: int
    rank: int
    error: int
