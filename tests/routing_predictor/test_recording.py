"""Recordings: parts of the requested size, the oldest dropped, and a disk that fails or is slow."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from routing_predictor.traces import recording
from routing_predictor.traces.recording import (
    RecordingStats,
    RecordingWriter,
    TracedTokens,
    TraceHeader,
    earlier_parts,
)
from routing_predictor.traces.routing_error import TraceError
from routing_predictor.traces.trace import DECODE, PREFILL
from routing_predictor.traces.trace_file import part_files, read_traces

HEADER = TraceHeader(num_experts=8, layers=(0, 2), model="tiny", has_tokens=True, has_weights=True)


def tokens(request: str, start: int, count: int) -> TracedTokens:
    """Returns expert and token ids that identify their request and position."""
    position = np.arange(start, start + count)
    ids = (position[:, None, None] + np.arange(4).reshape(1, 2, 2)) % 8
    return TracedTokens(
        request_id=request,
        start=start,
        num_prompt_tokens=3,
        expert_ids_NLK=ids.astype(np.uint8),
        token_ids_N=(position + 100 * int(request[1:])).astype(np.int32),
        weights_NLK=ids.astype(np.float16) / 8,
    )


def test_what_is_added_is_read(tmp_path: Path) -> None:
    writer = RecordingWriter(
        tmp_path / "one", HEADER, part_bytes=2**20, max_bytes=2**20, labels={"r1": "poem"}
    )
    for start, count in ((0, 2), (2, 2), (4, 1)):
        writer.add([tokens("r1", start, count)])
        writer.add([tokens("r2", start, count)])
    stats = writer.close()
    assert (stats.num_tokens, stats.num_parts, stats.num_lost_tokens) == (10, 1, 0)
    (part,) = part_files(tmp_path / "one")
    assert part.stat().st_size == stats.num_written_bytes
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0, "nobody else reads it"
    trace = read_traces([tmp_path / "one"])
    assert trace.request_ids == ("r1", "r2") and trace.labels == ("poem", "")
    assert trace.layers == (0, 2) and trace.model == "tiny"
    mine = trace.select(trace.request_N == 1)
    assert mine.position_N.tolist() == [0, 1, 2, 3, 4]
    assert mine.phase_N.tolist() == [PREFILL] * 3 + [DECODE] * 2
    assert mine.token_N is not None and mine.token_N.tolist() == [200, 201, 202, 203, 204]
    assert np.array_equal(mine.expert_ids_NLK, tokens("r2", 0, 5).expert_ids_NLK)
    assert mine.weights_NLK is not None
    assert np.array_equal(mine.weights_NLK, tokens("r2", 0, 5).weights_NLK)


def test_the_oldest_parts_are_dropped(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "one", HEADER, part_bytes=500, max_bytes=6000)
    for step in range(200):
        writer.add([tokens("r1", step, 1)])
        while not writer._full.empty():  # as slow as the disk: nothing may be lost here
            threading.Event().wait(0.0005)
    stats = writer.close()
    assert stats.num_lost_tokens == 0 and stats.num_dropped_parts > 0
    files = part_files(tmp_path / "one")
    assert len(files) == stats.num_parts
    assert sum(file.stat().st_size for file in files) <= 6000
    assert files[0].name == f"part-{stats.num_dropped_parts:06}.safetensors"
    trace = read_traces(files)
    assert trace.position_N[-1] == 199 and (np.diff(trace.position_N) == 1).all()


def test_earlier_recordings_count_and_go_first(tmp_path: Path) -> None:
    def record(name: str, count: int, max_bytes: int) -> RecordingStats:
        earlier = earlier_parts(tmp_path)
        writer = RecordingWriter(
            tmp_path / name, HEADER, part_bytes=1, max_bytes=max_bytes, earlier=earlier,
            is_patient=True,
        )  # fmt: skip
        for step in range(count):
            writer.add([tokens("r1", step, 1)])
        return writer.close()

    names = ["20260101-000000-10", "20260101-000000-9", "20260102-000000"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part-000000.safetensors").write_bytes(b"kept")
    for name in names[:2]:
        assert record(name, 3, 2**20).num_parts == 3
    size = earlier_parts(tmp_path)[0].size
    stats = record(names[2], 4, 5 * size + size // 2)
    assert (stats.num_parts, stats.num_dropped_parts) == (4, 5)
    assert not (tmp_path / names[1]).exists(), "the ninth of that second came before the tenth"
    left = [f"{part.path.parent.name}/{part.path.name}" for part in earlier_parts(tmp_path)]
    assert left[0] == f"{names[0]}/part-000002.safetensors" and len(left) == 5
    assert (tmp_path / "mine" / "part-000000.safetensors").read_bytes() == b"kept"


def test_a_slow_disk_loses_tokens_and_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_free = recording.write_trace, threading.Event()

    def slow(*arguments: object) -> int:
        assert is_free.wait(10)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "write_trace", slow)
    writer = RecordingWriter(tmp_path / "one", HEADER, part_bytes=1, max_bytes=2**20)
    for step in range(10):
        writer.add([tokens("r1", step, 1)])
    is_free.set()
    stats = writer.close()
    assert stats.num_tokens == 10
    assert stats.num_lost_tokens == 10 - stats.num_parts and stats.num_lost_tokens >= 7


def test_the_end_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part is written even if the queue of parts is full."""
    write, is_busy, is_free = recording.write_trace, threading.Event(), threading.Event()

    def slow(*arguments: object) -> int:
        is_busy.set()
        assert is_free.wait(10)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "write_trace", slow)
    writer = RecordingWriter(tmp_path / "one", HEADER, part_bytes=50, max_bytes=2**20)
    for start in (0, 2, 4):
        writer.add([tokens("r1", start, 2)])  # a whole part
        assert is_busy.wait(10)
    writer.add([tokens("r1", 6, 1)])
    put = writer._full.put

    def noted(part: list[TracedTokens] | None) -> None:
        put(part)
        is_free.set()

    monkeypatch.setattr(writer._full, "put", noted)
    stats = writer.close()
    assert (stats.num_tokens, stats.num_parts, stats.num_lost_tokens) == (7, 4, 0)
    assert read_traces([tmp_path / "one"]).position_N.tolist() == list(range(7))


def test_a_disk_that_fails_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordingWriter(tmp_path / "one", HEADER, part_bytes=2**20, max_bytes=2**20)
    (tmp_path / "one").rmdir()
    writer.add([tokens("r1", 0, 7)])
    stats = writer.close()
    assert stats.failure is not None and "cannot be written" in stats.failure
    assert stats.num_lost_tokens == 7 and stats.num_parts == 0
    assert "nothing more is recorded" in caplog.text


def test_who_waits_is_told_that_the_disk_failed(tmp_path: Path) -> None:
    writer = RecordingWriter(
        tmp_path / "one", HEADER, part_bytes=1, max_bytes=2**20, is_patient=True
    )
    (tmp_path / "one").rmdir()
    with pytest.raises(TraceError, match=r"cannot be written.*0 parts were written before"):
        for step in range(9):  # the thread says so while these wait
            writer.add([tokens("r1", step, 1)])
    with pytest.raises(TraceError, match="cannot be written"):
        writer.close()


def test_what_nobody_foresaw_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise MemoryError("no room")

    monkeypatch.setattr(recording, "write_trace", fail)
    writer = RecordingWriter(tmp_path / "one", HEADER, part_bytes=1, max_bytes=2**20)
    for step in range(9):
        writer.add([tokens("r1", step, 1)])
    stats = writer.close()
    assert stats.num_lost_tokens == 9
    assert stats.failure is not None and "MemoryError: no room" in stats.failure


def test_a_recording_of_nothing_leaves_nothing(tmp_path: Path) -> None:
    for is_patient in (True, False):  # a server's folder stays: its status names it
        folder = tmp_path / str(is_patient)
        RecordingWriter(folder, HEADER, part_bytes=1, max_bytes=1, is_patient=is_patient).close()
        assert folder.exists() != is_patient


def test_many_short_runs_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MAX_RUNS", 4)
    writer = RecordingWriter(
        tmp_path / "one", HEADER, part_bytes=2**20, max_bytes=2**20, is_patient=True
    )
    for step in range(10):
        writer.add([tokens("r1", step, 1)])
    assert writer.close().num_parts == 3
    assert read_traces([tmp_path / "one"]).position_N.tolist() == list(range(10))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "file" / "one"):
        with pytest.raises(TraceError, match="cannot be made"):
            RecordingWriter(folder, HEADER, part_bytes=1, max_bytes=1)
