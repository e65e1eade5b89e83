"""A rank's notes about its steps: waiting times always, stages only when they are recorded.

One step in sixteen is recorded for the metrics even without a timeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from moe_serve.pipeline.timeline.timeline_recorder import (
    NO_LAYER,
    NO_MICRO_BATCH,
    NO_TIMELINE,
    Recorder,
    Stage,
    TimelineRecorder,
)


class Operation(msgspec.Struct, frozen=True, gc=False):
    """The current operation. A msgspec struct, as one is made for every stage.

    `peer`: the rank it waits for; `since`: a reading of time.perf_counter(). `at_layer` and
    `at_peer` return the current layer and peer of an operation that passes several.
    """

    step: int
    stage: Stage
    layer: int
    micro_batch: int
    peer: str
    since: float
    at_layer: Callable[[], int] | None = None
    at_peer: Callable[[], str] | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since

    def __str__(self) -> str:
        """Describes the operation without its duration, which the caller adds when it reads it."""
        layer = self.layer if self.at_layer is None else self.at_layer()
        where = "" if layer == NO_LAYER else f", layer {layer}"
        batch = "" if self.micro_batch == NO_MICRO_BATCH else f", micro-batch {self.micro_batch}"
        name = self.peer if self.at_peer is None else self.at_peer()
        peer = f", waits for {name}" if name else ""
        return f"step {self.step}: {self.stage.label}{where}{batch}{peer}"


SAMPLED_EVERY = 16  # steps; the same steps on all ranks


class StageLog:
    """The log of one rank. `is_recording`: record every step, for a timeline."""

    def __init__(self, is_recording: bool = False) -> None:
        self._is_recording = is_recording
        self._ring = TimelineRecorder()
        self._now: Recorder = NO_TIMELINE
        self._step, self._start = 0, 0
        self.end = 0  # end of the last recorded stage
        self.waited_s = 0.0  # time spent waiting for other ranks in this step
        # from the start of the first layer to the end of the last, in this step
        self.layers_s = 0.0
        self.began = time.perf_counter()
        self.operation: Operation | None = None  # the current operation; other threads may read it

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
        at_layer: Callable[[], int] | None = None,
        at_peer: Callable[[], str] | None = None,
    ) -> None:
        """Notes that a stage, or a wait for a peer, starts;
        reports show it while it has not ended.
        """
        now = time.perf_counter()
        self.operation = Operation(
            self._step, stage, layer, micro_batch, peer, now, at_layer, at_peer
        )

    @property
    def is_on(self) -> bool:
        """True if the stages of this step are recorded."""
        return self._now.is_on

    def now(self) -> int:
        """Returns the current time, as a stage's start for `add`."""
        return self._now.now()

    def add(
        self,
        stage: Stage,
        layer: int,
        micro_batch: int,
        rows: int,
        start: int,
        end: int | None = None,
    ) -> int:
        """Records a stage that has ended, now or at `end` -> its end."""
        self.end = self._now.add(stage, self._step, layer, micro_batch, rows, start, end)
        return self.end

    def waited(self, since: float) -> None:
        """Adds the time since a reading of time.perf_counter() as waiting for other ranks."""
        self.waited_s += time.perf_counter() - since

    def waited_for(self, seconds: float) -> None:
        """Adds time that was spent waiting for other ranks."""
        self.waited_s += seconds

    def passed_layers(self, since: float, aside_s: float) -> None:
        """Notes that all layers ran since a reading of time.perf_counter(), except for `aside_s`
        seconds.
        """
        self.layers_s = time.perf_counter() - since - aside_s

    def finish(self, rows: int) -> float:
        """Ends the step -> its seconds on this rank."""
        self.operation = None
        self._now.add(Stage.STEP, self._step, NO_LAYER, NO_MICRO_BATCH, rows, self._start)
        return time.perf_counter() - self.began

    def give_up(self) -> None:
        """Notes that the step has failed: no operation is in progress."""
        self.operation = None

    def take(self) -> bytes:
        """Returns the records since the last call."""
        return self._now.take()
