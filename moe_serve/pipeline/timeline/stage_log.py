"""What a rank notes of a step: always how long it waited, and the stages when they are recorded.

A step in sixteen is recorded for the metrics although nobody asked for a timeline.
"""

from __future__ import annotations

import time

from moe_serve.pipeline.timeline.operation import Operation
from moe_serve.pipeline.timeline.timeline import (
    NO_LAYER,
    NO_MICRO_BATCH,
    NO_TIMELINE,
    Recorder,
    Stage,
    TimelineRecorder,
)

SAMPLED_EVERY = 16  # steps; the same ones on all ranks


class StageLog:
    """One rank's. `is_recording`: every step, for a timeline."""

    def __init__(self, is_recording: bool = False) -> None:
        self._is_recording = is_recording
        self._ring = TimelineRecorder()
        self._now: Recorder = NO_TIMELINE
        self._step, self._start = 0, 0
        self.end = 0  # of the last stage that was noted
        self.waited_s = 0.0  # for others, in this step
        self.layers_s = 0.0  # from the first layer's beginning to the last one's end, in this step
        self.began = time.perf_counter()
        self.operation: Operation | None = None  # what goes on now; other threads may read it

    def begin(self, step: int) -> None:
        """A step starts."""
        is_on = self._is_recording or step % SAMPLED_EVERY == 0
        self._now = self._ring if is_on else NO_TIMELINE
        self._step, self.waited_s, self.began = step, 0.0, time.perf_counter()
        self._start = self.end = self._now.now()
        self.enter(Stage.STEP)

    def enter(
        self,
        stage: Stage,
        layer: int = NO_LAYER,
        micro_batch: int = NO_MICRO_BATCH,
        peer: str = "",
    ) -> None:
        """A stage starts, or a wait for a peer: told if it does not end."""
        now = time.perf_counter()
        self.operation = Operation(self._step, stage, layer, micro_batch, peer, now)

    def now(self) -> int:
        """A stage's start, for `add`."""
        return self._now.now()

    def add(self, stage: Stage, layer: int, micro_batch: int, rows: int, start: int) -> int:
        """A stage has ended -> now."""
        self.end = self._now.add(stage, self._step, layer, micro_batch, rows, start)
        return self.end

    def waited(self, since: float) -> None:
        """For others, from this reading of time.perf_counter() on."""
        self.waited_s += time.perf_counter() - since

    def passed_layers(self, since: float, aside_s: float) -> None:
        """All layers, from this reading of time.perf_counter() on; `aside_s` went elsewhere."""
        self.layers_s = time.perf_counter() - since - aside_s

    def finish(self, rows: int) -> float:
        """The step has ended -> its seconds here."""
        self.operation = None
        self._now.add(Stage.STEP, self._step, NO_LAYER, NO_MICRO_BATCH, rows, self._start)
        return time.perf_counter() - self.began

    def give_up(self) -> None:
        """The step has failed: nothing goes on any more."""
        self.operation = None

    def take(self) -> bytes:
        """What was recorded since the last call."""
        return self._now.take()
