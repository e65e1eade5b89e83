"""Records and describes the stages of one step on each rank, timed from the step's start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import (
    RECORD_DTYPE,
    WAITING,
    Records,
    Stage,
    decode_records,
)

MAX_SPANS = 6000  # shown per step; of a larger step only the first layers are shown
WHY = "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage of a step. `kind` is its name, or "wait"."""

    start_ms: float
    end_ms: float
    kind: str
    layer: int | None
    micro_batch: int | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrack:
    """The spans of one rank or process."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """The newest step that was recorded on all ranks."""

    number: int
    duration_ms: float
    micro_batches: int
    why: str  # the reason for this number of micro-batches
    tracks: tuple[StepTrack, ...]
    num_left_out: int = 0  # spans beyond MAX_SPANS


def step_timeline(number: int, tracks: Mapping[str, Records], why: str) -> StepTimeline | None:
    """Builds the timeline of one step from each rank's records on one clock; None if no whole step
    is among them."""
    steps = [records[records["stage"] == Stage.STEP] for records in tracks.values()]
    whole = np.concatenate([np.empty(0, RECORD_DTYPE), *steps])
    if not len(whole):
        return None
    start_ns, end_ns = int(whole["start_ns"].min()), int(whole["end_ns"].max())
    spans = {name: records[records["stage"] != Stage.STEP] for name, records in tracks.items()}
    kept = _first_layers(spans)
    batches = [int(records["micro_batch"].max()) for records in spans.values() if len(records)]
    return StepTimeline(
        number=number,
        duration_ms=(end_ns - start_ns) / 1e6,
        micro_batches=max(batches, default=0) + 1,
        why=why,
        tracks=tuple(
            StepTrack(name=name, spans=tuple(_span(row, start_ns) for row in records.tolist()))
            for name, records in kept.items()
        ),
        num_left_out=_count(spans) - _count(kept),
    )


def _first_layers(tracks: Mapping[str, Records]) -> Mapping[str, Records]:
    """Keeps as many layers as MAX_SPANS allows. Spans without a layer are kept."""
    if _count(tracks) <= MAX_SPANS:
        return tracks
    layers = np.concatenate([records["layer"] for records in tracks.values()])
    most = int(np.sort(layers)[MAX_SPANS])  # the first layer that does not fit
    return {name: records[records["layer"] < most] for name, records in tracks.items()}


def _count(tracks: Mapping[str, Records]) -> int:
    return sum(len(records) for records in tracks.values())


def _span(row: tuple[int, int, int, int, int, int, int], zero_ns: int) -> Span:
    """Converts a record. The fields are in the order of RECORD_DTYPE."""
    start_ns, end_ns, _, rows, layer, number, micro_batch = row
    stage = Stage(number)
    return Span(
        start_ms=round((start_ns - zero_ns) / 1e6, 4),
        end_ms=round((end_ns - zero_ns) / 1e6, 4),
        kind="wait" if stage in WAITING else stage.label,
        layer=None if layer < 0 else layer,
        micro_batch=None if micro_batch < 0 else micro_batch,
        rows=rows,
    )


class StepWatch:
    """Keeps every sixteenth step of one process; the pipeline writes its stages into `log`.

    In one process the experts run during the dispatch stage, so that stage is shown as experts.
    """

    def __init__(self, log: StageLog) -> None:
        self._log = log
        self._num_steps = 0
        self._newest: tuple[int, bytes] | None = None  # replaced, never changed

    def begin(self) -> None:
        self._log.begin(self._num_steps)

    def finish(self, plan: StepPlan) -> None:
        """Keeps the step if it was recorded. Not called for a failed step."""
        num_tokens = plan.num_tokens if self._log.is_on else 0  # which only a record needs
        self._log.finish(num_tokens)
        if num_tokens and (records := self._log.take()):
            self._newest = (self._num_steps, records)
        self._num_steps += 1

    def last_step(self) -> StepTimeline | None:
        """Returns the newest recorded step. Safe from any thread."""
        if self._newest is None:
            return None
        number, packed = self._newest
        records = decode_records(packed).records.copy()
        records = records[records["step"] == number]  # without the rest of a failed step
        records["stage"][records["stage"] == Stage.DISPATCH] = Stage.EXPERTS
        return step_timeline(number, {"process": records}, WHY)
