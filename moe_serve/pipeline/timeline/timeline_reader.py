"""Reads a trace written by `TimelineWriter`, even if it ends in the middle of a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline.timeline_file import (
    LEFT_OUT,
    LOST,
    MARK,
    PROCESSES,
    THREADS_PER_PROCESS,
)
from moe_serve.pipeline.timeline.timeline_recorder import (
    RECORD_DTYPE,
    Records,
    Stage,
    Track,
    check_records,
)
from moe_serve.regular_file import regular_file

_ROLES = {process: role for role, process in PROCESSES.items()}
_STAGES = {stage.label: int(stage) for stage in Stage}
_MAX_LINE = 4096  # the writer's lines have about 150 characters
_Row = tuple[int, int, int, int, int, int, int]  # in the order of RECORD_DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A whole file; times are ns since the file was started."""

    tracks: Mapping[Track, Records]
    num_lost: int  # records that a rank's ring overwrote
    num_left_out: int  # records that the file had no room for
    is_cut: bool  # the writer was stopped before it ended the file

    def steps(self) -> list[int]:
        """Returns the numbers of all steps, in order."""
        numbers = [np.unique(records["step"]) for records in self.tracks.values()]
        found: list[int] = np.unique(np.concatenate(numbers)).tolist() if numbers else []
        return found

    def between(self, first: int, last: int) -> Timeline:
        """Returns the part in steps [first, last]."""
        tracks = {
            track: chosen
            for track, records in self.tracks.items()
            if len(chosen := records[(records["step"] >= first) & (records["step"] <= last)])
        }
        return replace(self, tracks=tracks)

    def around_layers(self, first: int, last: int) -> Timeline:
        """Returns the time from the first to the last stage of layers [first, last], cut at both
        ends.

        Raises TimelineError if no stage belongs to these layers.
        """
        stages = np.concatenate(list(self.tracks.values()))
        wanted = stages[(stages["layer"] >= first) & (stages["layer"] <= last)]
        if len(wanted) == 0:
            top = int(stages["layer"].max())
            raise TimelineError(
                f"no layer from {first} to {last} is recorded; the timeline has layers 0 to {top}"
            )
        begin_ns, end_ns = wanted["start_ns"].min(), wanted["end_ns"].max()
        tracks = {}
        for track, records in self.tracks.items():
            is_seen = (records["end_ns"] > begin_ns) & (records["start_ns"] < end_ns)
            is_step = records["stage"] == Stage.STEP
            seen = records[is_seen & ~(is_step & (records["start_ns"] < begin_ns))].copy()
            if len(seen):
                for field in ("start_ns", "end_ns"):
                    seen[field] = seen[field].clip(begin_ns, end_ns)
                tracks[track] = seen
        return replace(self, tracks=tracks)


def read_timeline(path: Path) -> Timeline:
    """Reads a timeline.

    Raises TimelineError for a file that is not a timeline, is damaged, or has no records.
    """
    try:
        with regular_file(path).open(encoding="utf-8") as file:
            timeline = _read(file, path)
    except OSError as error:
        raise TimelineError(f"cannot read the timeline {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TimelineError(_NOT_OURS.format(path=path)) from error
    if not timeline.tracks:
        raise TimelineError(f"the timeline {path} has no records: no step ran during recording")
    return timeline


_NOT_OURS = "{path} is not a timeline; record one with: moe-serve serve --timeline FILE"


class _Reading:
    """The contents of the lines read so far."""

    def __init__(self) -> None:
        self.rows: dict[Track, list[_Row]] = {}
        self.num_lost = 0
        self.num_left_out = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Adds an event.

        Raises the errors of indexing and arithmetic for an event that no writer wrote.
        """
        if event["ph"] == "X":
            self.rows.setdefault(_track_of(event), []).append(_row_of(event))
        elif event["ph"] == "i" and event["name"] == LOST:
            self.num_lost += int(event["args"]["num_records"])
        elif event["ph"] == "i" and event["name"] == LEFT_OUT:
            self.num_left_out += int(event["args"]["num_records"])


def _read(file: TextIO, path: Path) -> Timeline:
    if file.readline(_MAX_LINE).strip() != "[" or MARK not in file.readline(_MAX_LINE):
        raise TimelineError(_NOT_OURS.format(path=path))
    reading, is_cut, number = _Reading(), True, 2
    while line := file.readline(_MAX_LINE):
        number += 1
        if line.strip() == "]":
            is_cut = False
            break
        if not line.endswith("\n") and len(line) < _MAX_LINE:
            break  # the writer died here
        try:
            reading.take(json.loads(line.rstrip().removesuffix(",")))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TimelineError(f"line {number} of the timeline {path} is damaged") from error
    tracks = {}
    for track, rows in reading.rows.items():
        try:
            tracks[track] = np.array(rows, dtype=RECORD_DTYPE)
        except (OverflowError, ValueError) as error:
            raise TimelineError(f"{path} has a number of {track} that is too large") from error
        check_records(tracks[track])
    return Timeline(
        tracks=tracks,
        num_lost=reading.num_lost,
        num_left_out=reading.num_left_out,
        is_cut=is_cut,
    )


def _track_of(event: Mapping[str, Any]) -> Track:
    process, thread = event["pid"], event["tid"]
    return Track(_ROLES[process], thread - process * THREADS_PER_PROCESS)


def _row_of(event: Mapping[str, Any]) -> _Row:
    args = event["args"]
    start_ns = round(event["ts"] * 1000)
    end_ns = start_ns + round(event["dur"] * 1000)
    stage = _STAGES[event["name"]]
    layer, micro_batch = args["layer"], args["micro_batch"]
    return (start_ns, end_ns, args["step"], args["rows"], layer, stage, micro_batch)
