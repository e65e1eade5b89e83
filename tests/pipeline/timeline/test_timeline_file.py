"""The trace file reads back, survives the death of its writer, and keeps its size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline import timeline_file
from moe_serve.pipeline.timeline.timeline_file import TimelineWriter
from moe_serve.pipeline.timeline.timeline_reader import Timeline, read_timeline
from moe_serve.pipeline.timeline.timeline_recorder import Records, Stage, Track
from pictures.timeline_figure import SimulatedPipeline
from tests.support.pipeline.stage_rows import ATTENTION_0, EXPERT_0, records

ROOT = Path(__file__).resolve().parents[3]


def simulated(num_steps: int = 2) -> dict[Track, Records]:
    pipeline = SimulatedPipeline(2, 3, num_layers=3)
    for step in range(num_steps):
        pipeline.run_step(step, 2)
    return pipeline.tracks()


def written(path: Path, tracks: dict[Track, Records], max_bytes: int = 1 << 20) -> Path:
    writer = TimelineWriter(path, max_bytes)
    for track, some in tracks.items():
        writer.write(track, some, offset_ns=writer.zero_ns)
    writer.close()
    return path


def num_records(timeline: Timeline) -> int:
    return sum(len(some) for some in timeline.tracks.values())


def test_it_reads_back_to_the_nanosecond(tmp_path: Path) -> None:
    tracks = simulated()
    timeline = read_timeline(written(tmp_path / "t.json", tracks))
    assert timeline.tracks.keys() == tracks.keys()
    for track, expected in tracks.items():
        assert np.array_equal(timeline.tracks[track], expected), f"{track} differs"
    assert (timeline.is_cut, timeline.num_lost, timeline.num_left_out) == (False, 0, 0)
    assert timeline.steps() == [0, 1]
    assert timeline.between(1, 9).steps() == [1]


def test_it_is_a_chrome_trace(tmp_path: Path) -> None:
    """Complete events in microseconds, named processes and threads, thread ids used once."""
    events = json.loads(written(tmp_path / "t.json", simulated()).read_text("utf-8"))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert sorted(names.values()) == [
        *("attention 0", "attention 1", "coordinator", "expert 0", "expert 1", "expert 2"),
    ]
    assert len({thread for _, thread in names}) == len(names)
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"coordinator", "attention ranks", "expert ranks"}
    complete = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in complete} == names.keys()
    first = next(e for e in complete if e["name"] == "attention")
    start_ns = int(simulated()[ATTENTION_0]["start_ns"].min())
    assert (first["ts"], first["cat"]) == (start_ns / 1000, "busy")
    assert first["args"] == {"step": 0, "layer": 0, "micro_batch": 0, "rows": 64}


def test_clock_offsets_bring_ranks_onto_one_clock(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path / "t.json")
    some = records((Stage.EXPERTS, 0, 0, 1000, 2000))
    writer.write(EXPERT_0, some, offset_ns=writer.zero_ns - 500, num_lost=7)
    writer.close()
    timeline = read_timeline(tmp_path / "t.json")
    assert timeline.tracks[EXPERT_0][0]["start_ns"] == 500
    assert timeline.num_lost == 7


def test_a_file_that_ends_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    """A writer was killed in a write: every prefix after the first two lines is a timeline."""
    data = written(tmp_path / "t.json", {ATTENTION_0: simulated(1)[ATTENTION_0]}).read_bytes()
    head = data.index(b'"ph":"X"')
    for length in range(data.index(b"\n", head) + 1, len(data) - 2, 37):
        (tmp_path / "cut.json").write_bytes(data[:length])
        timeline = read_timeline(tmp_path / "cut.json")
        assert timeline.is_cut
        whole_lines = data[:length].rpartition(b"\n")[0]
        assert num_records(timeline) == whole_lines.count(b'"ph":"X"')


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from pictures.timeline_figure import SimulatedPipeline
from moe_serve.pipeline.timeline.timeline_file import TimelineWriter

pipeline, path = SimulatedPipeline(1, 1, num_layers=2), Path(sys.argv[1])
pipeline.run_step(0, 2)
writer = TimelineWriter(path)
for track, records in pipeline.tracks().items():
    writer.write(track, records)
while path.read_bytes().count(b'"name":"step"') < 3:
    threading.Event().wait(0.002)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_server_leaves_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    folders = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "scripts")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], env=environment, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    timeline = read_timeline(path)
    assert timeline.is_cut and timeline.steps() == [0]
    assert {str(track) for track in timeline.tracks} == {"coordinator", "attention 0", "expert 0"}


def test_the_file_keeps_its_size(tmp_path: Path) -> None:
    tracks, limit = simulated(4), 20_000
    path = written(tmp_path / "t.json", tracks, max_bytes=limit)
    assert path.stat().st_size <= limit
    json.loads(path.read_text("utf-8"))
    timeline = read_timeline(path)
    total = sum(len(some) for some in tracks.values())
    assert (num_records(timeline) + timeline.num_left_out, timeline.is_cut) == (total, False)
    assert timeline.num_left_out > 0


@pytest.mark.parametrize("is_full", [False, True])
def test_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The recorder goes on with room in the backlog and without. The disk later has a whole
    file."""
    answers, write_batch = threading.Event(), TimelineWriter._write_batch

    def hang(writer: TimelineWriter, batch: Any) -> None:
        assert answers.wait(60.0), "nobody sets it"
        write_batch(writer, batch)

    monkeypatch.setattr(TimelineWriter, "_write_batch", hang)
    monkeypatch.setattr(timeline_file, "_CLOSE_S", 0.0)
    writer = TimelineWriter(tmp_path / "t.json")
    some = records((Stage.EXPERTS, 0, 0, 1000, 2000))
    writer.write(EXPERT_0, some)
    while is_full and not writer._num_beyond_backlog:
        writer.write(EXPERT_0, some)
    with pytest.raises(TimeoutError, match="did not take the last records within 0 s"):
        writer.close()
    answers.set()
    writer._thread.join(60.0)
    timeline = read_timeline(tmp_path / "t.json")
    assert not timeline.is_cut and timeline.num_left_out == is_full


def test_a_file_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        TimelineWriter(tmp_path / "missing" / "t.json")


GOOD = '{"name":"step","ph":"X","pid":2,"tid":200000,"ts":0.0,"dur":1.0,"args":%s},\n'
ARGS = '{"step":0,"layer":-1,"micro_batch":-1,"rows":1}'
HEAD = '[\n{"args": {"labels": "moe-serve timeline 1"}, "ph": "M", "name": "process_labels"},\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a timeline"),
        ("hello\nworld\n", "is not a timeline"),
        ('[\n{"name": "another trace"},\n]\n', "is not a timeline"),
        (HEAD + "]\n", "has no records"),
        (HEAD + "{}\n", "line 3 of the timeline"),
        (HEAD + GOOD % ARGS + "x\n", "line 4 of the timeline"),
        (HEAD + "x" * 9000 + "\n", "line 3 of the timeline"),
        (HEAD + "[" * 4000 + "\n", "line 3 of the timeline"),
        (HEAD + GOOD % ARGS.replace(":1", ":1e400"), "number of attention 0"),
        (HEAD + GOOD % ARGS.replace(":1", ":-5"), "number of attention 0"),
        (HEAD + GOOD % ARGS.replace(":1", ":99999999999"), "number of attention 0"),
        (HEAD + GOOD % ARGS.replace(":1", ':"many"'), "number of attention 0"),
        (HEAD + (GOOD % ARGS).replace('"ts":0.0', '"ts":NaN'), "line 3 of the timeline"),
        (HEAD + (GOOD % ARGS).replace('"dur":1.0', '"dur":-1.0'), "record 0 of 1 is invalid"),
        (HEAD + (GOOD % ARGS).replace('"pid":2', '"pid":9'), "line 3 of the timeline"),
        (HEAD + (GOOD % ARGS).replace("step", "jump", 1), "line 3 of the timeline"),
    ],
)
def test_what_is_no_timeline_is_refused_in_one_sentence(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "t.json").write_text(text, "utf-8")
    with pytest.raises(TimelineError, match=message):
        read_timeline(tmp_path / "t.json")


def test_bytes_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TimelineError, match="is not a timeline"):
        read_timeline(tmp_path / "t.json")
    with pytest.raises(TimelineError, match="cannot read the timeline .*: No such file"):
        read_timeline(tmp_path / "missing.json")
