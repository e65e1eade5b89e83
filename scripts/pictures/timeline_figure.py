"""Draws the figure of docs/operate/timeline.md: a step with 1, 2 and 3 micro-batches.

PYTHONPATH=scripts python -m pictures.timeline_figure [FILE]

The timeline is simulated, and tests use the simulation, too. The times are invented; the order of
stages is the pipeline's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from moe_serve.pipeline.timeline.pool_metrics import measure
from moe_serve.pipeline.timeline.timeline_plot import add_legend, describe, draw_rows
from moe_serve.pipeline.timeline.timeline_recorder import (
    NO_LAYER,
    NO_MICRO_BATCH,
    RECORD_DTYPE,
    Records,
    Role,
    Stage,
    Track,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The nanoseconds of one micro-batch with the whole batch; `part` scales them for a split."""

    attention_ns: int = 400_000
    experts_ns: int = 420_000
    shared_ns: int = 0
    transfer_ns: int = 60_000  # one way
    copy_ns: int = 25_000  # dispatch, combine, pack and send, each
    head_ns: int = 150_000  # logits, and sampling
    jitter: float = 0.05
    slow_ranks: Mapping[Track, float] = field(default_factory=dict)  # times longer

    def part(self, num_micro_batches: int) -> float:
        """Returns the time of a part of the batch; a half takes 0.55 of the whole."""
        return 1 / num_micro_batches + 0.05 * (num_micro_batches > 1)


class _Rank:
    """One rank's clock and its recorded events."""

    def __init__(self, track: Track, times: StageTimes, seed: int) -> None:
        self.now_ns = 0
        self.rows: list[tuple[int, ...]] = []
        self._factor = times.slow_ranks.get(track, 1.0)
        self._jitter = times.jitter
        self._random = random.Random(f"{seed} {track}")

    def run(self, stage: Stage, place: tuple[int, int, int], rows: int, length_ns: float) -> None:
        spread = self._random.uniform(1 - self._jitter, 1 + self._jitter)
        self.until(stage, place, rows, self.now_ns + round(length_ns * spread * self._factor))

    def until(self, stage: Stage, place: tuple[int, int, int], rows: int, end_ns: int) -> None:
        """Waits for a message at `place` (step, layer, micro-batch); takes no time if it has
        arrived.
        """
        end_ns = max(end_ns, self.now_ns)
        self.record(stage, place, rows, self.now_ns, end_ns)
        self.now_ns = end_ns

    def record(
        self, stage: Stage, place: tuple[int, int, int], rows: int, start_ns: int, end_ns: int
    ) -> None:
        step, layer, micro_batch = place
        self.rows.append((start_ns, end_ns, step, rows, layer, int(stage), micro_batch))


class SimulatedPipeline:
    """Simulates A attention and E expert ranks that run steps of m micro-batches."""

    def __init__(
        self,
        num_attention_ranks: int,
        num_expert_ranks: int,
        num_layers: int,
        times: StageTimes | None = None,
        seed: int = 0,
    ) -> None:
        self.times = times or StageTimes()
        self._num_layers = num_layers
        self._coordinator = _Rank(Track(Role.COORDINATOR, 0), self.times, seed)
        self._attention = {
            track: _Rank(track, self.times, seed)
            for track in [Track(Role.ATTENTION, a) for a in range(num_attention_ranks)]
        }
        self._experts = {
            track: _Rank(track, self.times, seed)
            for track in [Track(Role.EXPERT, e) for e in range(num_expert_ranks)]
        }

    def tracks(self) -> dict[Track, Records]:
        """Returns all events so far."""
        ranks = {Track(Role.COORDINATOR, 0): self._coordinator, **self._attention, **self._experts}
        return {track: np.array(rank.rows, RECORD_DTYPE) for track, rank in ranks.items()}

    def run_step(self, step: int, num_micro_batches: int, rows: int = 64) -> None:
        """Runs a step; `rows` is the number of one attention rank and micro-batch."""
        whole, begin_ns = (step, NO_LAYER, NO_MICRO_BATCH), self._coordinator.now_ns
        self._coordinator.run(Stage.SCHEDULE, whole, 0, 60_000)
        ranks = [*self._attention.values(), *self._experts.values()]
        for rank in ranks:
            rank.now_ns = self._coordinator.now_ns + 20_000
        step_ns = self._coordinator.now_ns + 20_000
        back_ns = [0] * num_micro_batches  # when the experts' sums are at the attention ranks
        for layer in range(self._num_layers):
            for index in range(num_micro_batches):
                place = (step, layer, index)
                sent_ns = self._attend(place, rows, back_ns[index], num_micro_batches)
                back_ns[index] = self._multiply(place, rows, sent_ns, num_micro_batches)
        for index in range(num_micro_batches):
            self._combine((step, self._num_layers, index), rows, back_ns[index])
        for rank in self._attention.values():
            for stage in (Stage.LOGITS, Stage.SAMPLE):
                rank.run(stage, whole, rows * num_micro_batches, self.times.head_ns / 2)
        for rank in ranks:
            rank.record(Stage.STEP, whole, rows * num_micro_batches, step_ns, rank.now_ns)
        end_ns = max(rank.now_ns for rank in self._attention.values()) + 20_000
        self._coordinator.until(Stage.CONTROL_WAIT, whole, 0, end_ns)
        self._coordinator.run(Stage.PUBLISH, whole, 0, 40_000)
        self._coordinator.record(Stage.STEP, whole, 0, begin_ns, self._coordinator.now_ns)

    def _attend(self, place: tuple[int, int, int], rows: int, back_ns: int, m: int) -> int:
        """Returns the time at which the last rank's rows have reached the experts."""
        times = self.times
        self._combine(place, rows, back_ns)
        sent_ns = 0
        for rank in self._attention.values():
            rank.run(Stage.ATTENTION, place, rows, times.attention_ns * times.part(m))
            rank.run(Stage.DISPATCH, place, rows, times.copy_ns)
            sent_ns = max(sent_ns, rank.now_ns + times.transfer_ns)
            if times.shared_ns:
                rank.run(Stage.SHARED, place, rows, times.shared_ns * times.part(m))
        return sent_ns

    def _combine(self, place: tuple[int, int, int], rows: int, back_ns: int) -> None:
        """Adds the sums of the layer below."""
        step, layer, index = place
        if layer == 0:
            return
        for rank in self._attention.values():
            rank.until(Stage.WAIT_COMBINE, (step, layer - 1, index), rows, back_ns)
            rank.run(Stage.COMBINE, (step, layer - 1, index), rows, self.times.copy_ns)

    def _multiply(self, place: tuple[int, int, int], rows: int, sent_ns: int, m: int) -> int:
        """Returns the time at which the last rank's sums have reached the attention ranks."""
        times, back_ns = self.times, 0
        for rank in self._experts.values():
            rank.until(Stage.WAIT_DISPATCH, place, rows, sent_ns)
            rank.run(Stage.PACK, place, rows, times.copy_ns)
            rank.run(Stage.EXPERTS, place, rows, times.experts_ns * times.part(m))
            rank.run(Stage.SEND, place, rows, times.copy_ns)
            back_ns = max(back_ns, rank.now_ns + times.transfer_ns)
        return back_ns


TARGET = Path(__file__).parents[2] / "docs" / "images" / "timeline.png"


def main(path: Path) -> None:
    times = StageTimes(transfer_ns=90_000)
    figure = Figure(figsize=(15, 8.2), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    longest_ms = 0.0
    for num_micro_batches, axes in enumerate(panels, start=1):
        pipeline = SimulatedPipeline(1, 1, num_layers=6, times=times)
        pipeline.run_step(0, num_micro_batches)
        tracks = pipeline.tracks()
        metrics = measure(tracks)
        del tracks[Track(Role.COORDINATOR, 0)]
        draw_rows(axes, tracks)
        noun = "micro-batch" if num_micro_batches == 1 else "micro-batches"
        axes.set_title(f"{num_micro_batches} {noun}:  {describe(metrics)}", loc="left", fontsize=12)
        axes.set_xlabel(axes.get_xlabel() if num_micro_batches == 3 else "")
        longest_ms = max(longest_ms, metrics.elapsed_ns / 1e6)
    panels[0].set_xlim(0, longest_ms)
    add_legend(figure, tracks)
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
