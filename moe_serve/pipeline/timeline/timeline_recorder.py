"""Records the stages of one rank with their times: fixed-size records in a ring, read by the
coordinator.

    start = recorder.now()
    ...                                                     # the stage
    start = recorder.add(Stage.ATTENTION, step, layer, micro_batch, rows, start)

`add` returns the end, which is the next stage's start if nothing lies between. Without a timeline
every rank holds `NO_TIMELINE`, whose methods do nothing.

Times are the host's monotonic clock. On a CUDA device a stage's time is therefore the time of
launching its kernels, until some stage waits for them: the step's total is right, its parts are
not.

A recorder belongs to the thread that runs the rank's steps; `take` is called there as well.

On the wire, little-endian: magic "MSTL", version u16, record size u16, u32 number of records, u32
number of records lost since the last `take`; then the records, oldest first (`RECORD_DTYPE`).
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_serve.errors import TimelineError

NO_LAYER = -1
NO_MICRO_BATCH = -1
DEFAULT_CAPACITY = 1 << 15  # records; 0.9 MB: 15 steps of 60 layers, 3 micro-batches and 12 stages
MAX_CAPACITY = 1 << 20  # limit that `decode_records` accepts

Records = npt.NDArray[np.void]  # of RECORD_DTYPE

_MAGIC = b"MSTL"
_VERSION = 1
_HEADER = struct.Struct("<4sHHII")
_RECORD = struct.Struct("<qqIIhBb")
RECORD_DTYPE = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("step", "<u4"),
        ("rows", "<u4"),
        ("layer", "<i2"),
        ("stage", "u1"),
        ("micro_batch", "i1"),
    ]
)
assert RECORD_DTYPE.itemsize == _RECORD.size, "the two descriptions of a record differ"


class Role(str, Enum):
    """The pool of a rank."""

    COORDINATOR = "coordinator"
    ATTENTION = "attention"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True, order=True)
class Track:
    """A rank, as the timeline names it: `attention 0`."""

    role: Role
    index: int

    def __str__(self) -> str:
        return (
            self.role.value if self.role is Role.COORDINATOR else f"{self.role.value} {self.index}"
        )


class Stage(IntEnum):
    """The stages of a rank. The numbers are part of the wire format: never reuse one."""

    STEP = 0  # the whole step on this rank; all other stages lie within it
    ATTENTION = 1  # norms, attention, router
    DISPATCH = 2  # pack the rows and pass them to the transport
    WAIT_COMBINE = 3  # idle until the experts' sums arrive
    COMBINE = 4  # add partial sums, shared expert and residual
    SHARED = 5  # the shared expert
    LOGITS = 6
    SAMPLE = 7
    WAIT_DISPATCH = 16  # an expert rank without rows to compute
    PACK = 17  # combine rows of all attention ranks into one batch
    EXPERTS = 18  # the grouped product
    SEND = 19  # send partial sums to the attention ranks
    SCHEDULE = 32
    PUBLISH = 33
    CONTROL_WAIT = 34  # the coordinator waits for the ranks' answers

    @property
    def label(self) -> str:
        return self.name.lower()


WAITING = frozenset({Stage.WAIT_COMBINE, Stage.WAIT_DISPATCH, Stage.CONTROL_WAIT})
_STAGE_NUMBERS = np.array(sorted(Stage), dtype=np.uint8)


class Recorder(Protocol):
    """The interface of a recorder, as used by the code of a rank."""

    @property
    def is_on(self) -> bool: ...

    def now(self) -> int:
        """Returns the time in ns to pass to `add`; 0 when nothing is recorded."""
        ...

    def add(
        self,
        stage: Stage,
        step: int,
        layer: int,
        micro_batch: int,
        rows: int,
        start: int,
        end: int | None = None,
    ) -> int:
        """Records a stage from `start` until `end` (None: now) -> its end. -1 means no single layer
        or micro-batch."""
        ...

    def take(self) -> bytes:
        """Returns the records since the last `take`, for `decode_records`; b"" if there are
        none."""
        ...


class NullRecorder:
    """Records nothing; costs one call."""

    is_on = False

    def now(self) -> int:
        return 0

    def add(
        self,
        stage: Stage,
        step: int,
        layer: int,
        micro_batch: int,
        rows: int,
        start: int,
        end: int | None = None,
    ) -> int:
        return 0

    def take(self) -> bytes:
        return b""


NO_TIMELINE: Recorder = NullRecorder()


class TimelineRecorder:
    """Keeps a ring of the newest `capacity` records, so memory stays bounded if they are never
    read.
    """

    is_on = True

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        assert 1 <= capacity <= MAX_CAPACITY, f"capacity {capacity} is not in [1, {MAX_CAPACITY}]"
        self._capacity = capacity
        self._ring = bytearray(capacity * _RECORD.size)
        self._num_added = 0
        self._num_taken = 0

    def now(self) -> int:
        return time.perf_counter_ns()

    def add(
        self,
        stage: Stage,
        step: int,
        layer: int,
        micro_batch: int,
        rows: int,
        start: int,
        end: int | None = None,
    ) -> int:
        end = time.perf_counter_ns() if end is None else end
        place = self._num_added % self._capacity * _RECORD.size
        _RECORD.pack_into(self._ring, place, start, end, step, rows, layer, stage, micro_batch)
        self._num_added += 1
        return end

    def take(self) -> bytes:
        num_new = self._num_added - self._num_taken
        if num_new == 0:
            return b""
        num_lost = max(0, num_new - self._capacity)
        num_records = num_new - num_lost
        first = (self._num_taken + num_lost) % self._capacity
        # [first, capacity) [0, rest): the second part is empty unless the records wrap around the
        # end.
        until_end = min(num_records, self._capacity - first)
        size = _RECORD.size
        self._num_taken = self._num_added
        return b"".join(
            (
                _HEADER.pack(_MAGIC, _VERSION, size, num_records, min(num_lost, 2**32 - 1)),
                memoryview(self._ring)[first * size : (first + until_end) * size],
                memoryview(self._ring)[: (num_records - until_end) * size],
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenRecords:
    """The records of one `take`; times are on the rank's own clock."""

    records: Records  # [N] of RECORD_DTYPE, oldest first
    num_lost: int


def decode_records(data: bytes) -> TakenRecords:
    """Decodes the records of a `take`. Raises TimelineError for bytes that no recorder wrote."""
    if not data:
        return TakenRecords(records=np.empty(0, RECORD_DTYPE), num_lost=0)
    if len(data) < _HEADER.size:
        raise TimelineError(f"{len(data)} bytes are too few for a rank's timeline records")
    magic, version, record_size, num_records, num_lost = _HEADER.unpack_from(data)
    if (magic, version, record_size) != (_MAGIC, _VERSION, _RECORD.size):
        raise TimelineError(
            f"timeline records start with {magic!r}, version {version}, {record_size} bytes each; "
            f"expected {_MAGIC!r}, {_VERSION}, {_RECORD.size}: do all ranks run the same release?"
        )
    if num_records > MAX_CAPACITY or len(data) != _HEADER.size + num_records * _RECORD.size:
        raise TimelineError(
            f"{len(data)} bytes cannot be {num_records} timeline records of {_RECORD.size} bytes"
        )
    records = np.frombuffer(data, RECORD_DTYPE, offset=_HEADER.size)
    check_records(records)
    return TakenRecords(records=records, num_lost=num_lost)


def check_records(records: Records) -> None:
    """Raises TimelineError naming the first impossible record."""
    is_wrong = (
        ~np.isin(records["stage"], _STAGE_NUMBERS)
        | (records["start_ns"] < -(2**62))
        | (records["end_ns"] < records["start_ns"])
        | (records["end_ns"] > 2**62)
        | (records["layer"] < NO_LAYER)
        | (records["micro_batch"] < NO_MICRO_BATCH)
    )
    if is_wrong.any():
        place = int(is_wrong.argmax())
        raise TimelineError(
            f"timeline record {place} of {len(records)} is invalid: {records[place]}"
        )
