"""A rank's recorder: a ring that drops the oldest records, and a decoder that trusts no input."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline.timeline_recorder import (
    NO_TIMELINE,
    RECORD_DTYPE,
    Role,
    Stage,
    TimelineRecorder,
    Track,
    decode_records,
)


def steps_of(data: bytes) -> list[int]:
    return [int(step) for step in decode_records(data).records["step"]]


def test_a_record_comes_back_whole() -> None:
    recorder = TimelineRecorder(capacity=4)
    start = recorder.now()
    end = recorder.add(Stage.EXPERTS, 7, 3, 1, 128, start)
    taken = decode_records(recorder.take())
    (record,) = taken.records
    assert record.tolist() == (start, end, 7, 128, 3, Stage.EXPERTS, 1)
    assert (start <= end, taken.num_lost) == (True, 0)
    assert recorder.take() == b"", "each record is taken once"


def test_no_layer_and_no_micro_batch_are_minus_one() -> None:
    recorder = TimelineRecorder()
    recorder.add(Stage.STEP, 0, -1, -1, 0, recorder.now())
    (record,) = decode_records(recorder.take()).records
    assert (record["layer"], record["micro_batch"]) == (-1, -1)


def test_the_ring_keeps_the_newest() -> None:
    """Capacity 4: steps 0..2 are taken; of 3..8 the ring holds 5..8, laid out as 8 5 6 7."""
    recorder = TimelineRecorder(capacity=4)
    for step in range(3):
        recorder.add(Stage.STEP, step, -1, -1, 0, recorder.now())
    assert steps_of(recorder.take()) == [0, 1, 2]
    for step in range(3, 9):
        recorder.add(Stage.STEP, step, -1, -1, 0, recorder.now())
    data = recorder.take()
    assert (steps_of(data), decode_records(data).num_lost) == ([5, 6, 7, 8], 2)


@given(st.integers(1, 7), st.lists(st.integers(0, 20), max_size=8))
def test_nothing_is_doubled_and_losses_are_counted(capacity: int, bursts: list[int]) -> None:
    recorder, step = TimelineRecorder(capacity), 0
    for burst in bursts:
        for _ in range(burst):
            recorder.add(Stage.STEP, step, -1, -1, 0, recorder.now())
            step += 1
        data = recorder.take()
        kept = min(burst, capacity)
        assert steps_of(data) == list(range(step - kept, step))
        assert decode_records(data).num_lost == burst - kept


def test_without_a_timeline_nothing_is_kept() -> None:
    start = NO_TIMELINE.now()
    assert NO_TIMELINE.add(Stage.STEP, 0, 0, 0, 0, start) == 0
    assert (NO_TIMELINE.take(), NO_TIMELINE.is_on) == (b"", False)
    assert len(decode_records(b"").records) == 0


def frame() -> bytearray:
    recorder = TimelineRecorder()
    for step in range(2):
        recorder.add(Stage.ATTENTION, step, 0, 0, 1, recorder.now())
    return bytearray(recorder.take())


def changed(place: int, format_: str, value: int) -> bytes:
    data = frame()
    struct.pack_into(format_, data, place, value)
    return bytes(data)


SECOND = 16 + RECORD_DTYPE.itemsize


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x", "1 bytes are too few"),
        (b"XXXX" + bytes(frame()[4:]), "start with b'XXXX'"),
        (changed(4, "<H", 9), "version 9"),
        (changed(8, "<I", 3), "cannot be 3 timeline records"),
        (changed(8, "<I", 2**32 - 1), "cannot be 4294967295 timeline records"),
        (bytes(frame()[:-1]), "cannot be 2 timeline records"),
        (bytes(frame()) + b"x", "cannot be 2 timeline records"),
        (changed(SECOND + 26, "B", 200), "record 1 of 2 is invalid"),  # no such stage
        (changed(SECOND, "<q", 2**62), "record 1 of 2 is invalid"),  # ends before it starts
        (changed(SECOND + 24, "<h", -2), "record 1 of 2 is invalid"),
        (changed(SECOND + 27, "b", -2), "record 1 of 2 is invalid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the bytes have times in them
)
def test_bytes_that_no_recorder_wrote_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(TimelineError, match=message):
        decode_records(data)


@given(st.binary(max_size=200))
def test_noise_never_crashes_the_decoder(noise: bytes) -> None:
    data = bytes(frame()[:16]) + noise
    try:
        decode_records(data)
    except TimelineError:
        return
    assert len(noise) == 2 * RECORD_DTYPE.itemsize


def test_tracks_are_named_as_people_name_ranks() -> None:
    assert [str(Track(role, 2)) for role in Role] == ["coordinator", "attention 2", "expert 2"]
    assert Stage.WAIT_COMBINE.label == "wait_combine"
