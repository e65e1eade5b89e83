"""Writes the file of a timeline: a Chrome trace that Perfetto and chrome://tracing open directly.

JSON array format, one event per line, so a file that ends in the middle is still a trace: the
closing bracket is optional. Times are microseconds since the writer was made, on the coordinator's
clock. Each pool is a process of the trace, each rank a thread of it; stages lie within their step.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from moe_serve.pipeline.timeline.timeline_recorder import WAITING, Records, Role, Stage, Track

DEFAULT_MAX_BYTES = 1 << 30
MARK = "moe-serve timeline 1"  # label of the first event, which identifies our traces
LOST = "records lost"  # a rank's ring was too small
LEFT_OUT = "records left out"  # the file was full, or the disk was too slow
PROCESSES = {Role.COORDINATOR: 1, Role.ATTENTION: 2, Role.EXPERT: 3}
THREADS_PER_PROCESS = 100_000  # thread ids are unique over all processes, as viewers expect
_PROCESS_NAMES = {
    Role.COORDINATOR: "coordinator",
    Role.ATTENTION: "attention ranks",
    Role.EXPERT: "expert ranks",
}
_RESERVED_BYTES = 512  # reserved for the closing note
_MAX_BACKLOG = 1024  # maximum number of `write` calls waiting for the disk
_CLOSE_S = 30.0  # time given to the disk to write what is queued


@dataclass(frozen=True, slots=True)
class _Batch:
    """The records of one call of `write`."""

    track: Track
    records: Records
    shift_ns: int  # added to the rank's clock to get the file's
    num_lost: int


class TimelineWriter:
    """Writes records as they come, on its own thread; the caller never waits for the disk.

    Once the file has `max_bytes`, only the number of omitted records is written. `write` and
    `close` must be called from one thread.
    """

    def __init__(self, path: Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Opens the file; raises OSError if it cannot be made."""
        self.zero_ns, self.path = time.perf_counter_ns(), path
        self._file: BinaryIO = path.open("wb")
        self._num_bytes_left = max_bytes - _RESERVED_BYTES
        self._is_full = False
        self._tracks: set[Track] = set()
        self._num_beyond_size = 0  # omitted records counted by the writing thread
        self._num_beyond_backlog = 0  # omitted records counted by `write`
        self._error: OSError | None = None
        self._is_closing = False
        self._backlog: queue.Queue[_Batch | None] = queue.Queue(_MAX_BACKLOG)
        label = _metadata("process_labels", PROCESSES[Role.COORDINATOR], 0, {"labels": MARK})
        self._file.write(b"[\n" + label)
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def write(self, track: Track, records: Records, offset_ns: int = 0, num_lost: int = 0) -> None:
        """Queues a rank's records; the rank's clock plus `offset_ns` is the coordinator's clock."""
        try:
            self._backlog.put_nowait(_Batch(track, records, offset_ns - self.zero_ns, num_lost))
        except queue.Full:
            self._num_beyond_backlog += len(records)

    def close(self) -> None:
        """Writes what is queued and ends the file.

        Raises OSError if the disk failed meanwhile or does not take everything in time. The file
        then has no closing bracket, and its thread ends with the process.
        """
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # a full queue wakes the thread anyway
            self._backlog.put_nowait(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"the disk did not take the last records within {_CLOSE_S:g} s; the file ends "
                "without them"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Writes all data on this thread, where a hanging disk delays no caller."""
        while (batch := self._next()) is not None:
            if self._is_full or self._error is not None:
                self._num_beyond_size += len(batch.records)
                continue
            try:
                self._write_batch(batch)
            except OSError as error:
                self._error = error
        try:
            self._end()
        except OSError as error:
            self._error = self._error or error

    def _next(self) -> _Batch | None:
        """Returns the next batch; None if the writer was closed and the queue is empty."""
        if self._is_closing and self._backlog.empty():
            return None
        return self._backlog.get()

    def _end(self) -> None:
        with self._file:
            if self._error is not None:
                return
            num_left_out = self._num_beyond_size + self._num_beyond_backlog
            if num_left_out:
                at_ns = time.perf_counter_ns() - self.zero_ns
                self._file.write(_note(LEFT_OUT, Track(Role.COORDINATOR, 0), at_ns, num_left_out))
            # The last event has no comma.
            self._file.write(_metadata("end", PROCESSES[Role.COORDINATOR], 0, {})[:-2] + b"\n]\n")

    def _write_batch(self, batch: _Batch) -> None:
        if batch.track not in self._tracks:
            self._tracks.add(batch.track)
            self._put(_names(batch.track))
        if batch.num_lost:
            first_ns = int(batch.records["start_ns"].min(initial=0)) + batch.shift_ns
            self._put(_note(LOST, batch.track, first_ns, batch.num_lost))
        for place, line in enumerate(_events(batch)):
            if not self._put(line):
                self._num_beyond_size += len(batch.records) - place
                break
        self._file.flush()  # written data survives the death of this process

    def _put(self, data: bytes) -> bool:
        """Writes `data` if it fits -> whether it did."""
        self._is_full = self._is_full or len(data) > self._num_bytes_left
        if not self._is_full:
            self._num_bytes_left -= self._file.write(data)
        return not self._is_full


def thread_of(track: Track) -> int:
    return PROCESSES[track.role] * THREADS_PER_PROCESS + track.index


def _metadata(name: str, process: int, thread: int, args: Mapping[str, str | int]) -> bytes:
    event = {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}
    return json.dumps(event).encode() + b",\n"


def _note(name: str, track: Track, at_ns: int, num_records: int) -> bytes:
    event = {
        "name": name,
        "ph": "i",
        "s": "t",
        "pid": PROCESSES[track.role],
        "tid": thread_of(track),
        "ts": at_ns / 1000,
        "args": {"num_records": num_records},
    }
    return json.dumps(event).encode() + b",\n"


def _names(track: Track) -> bytes:
    """Returns the metadata events of a rank and of its pool."""
    process, thread = PROCESSES[track.role], thread_of(track)
    return b"".join(
        (
            _metadata("process_name", process, thread, {"name": _PROCESS_NAMES[track.role]}),
            _metadata("process_sort_index", process, thread, {"sort_index": process}),
            _metadata("thread_name", process, thread, {"name": str(track)}),
            _metadata("thread_sort_index", process, thread, {"sort_index": track.index}),
        )
    )


def _events(batch: _Batch) -> Iterator[bytes]:
    """Formats one line per record by hand, because `json.dumps` takes three times as long."""
    place = f'"ph":"X","pid":{PROCESSES[batch.track.role]},"tid":{thread_of(batch.track)}'
    heads = {
        int(stage): f'{{"name":"{stage.label}","cat":"{_category(stage)}",{place}'
        for stage in Stage
    }
    for start_ns, end_ns, step, rows, layer, stage, micro_batch in batch.records.tolist():
        begin, length = (start_ns + batch.shift_ns) / 1000, (end_ns - start_ns) / 1000
        args = f'"step":{step},"layer":{layer},"micro_batch":{micro_batch},"rows":{rows}'
        yield f'{heads[stage]},"ts":{begin:.3f},"dur":{length:.3f},"args":{{{args}}}}},\n'.encode()


def _category(stage: Stage) -> str:
    return "waiting" if stage in WAITING else "step" if stage is Stage.STEP else "busy"
