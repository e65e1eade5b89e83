"""Computes stage times and steps from the times of both ranks, and compares them with the formulas.

Other programs can only make a step slower, so the lower quartile of several steps counts (`usual`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.planning.measure import usual

from .job import StepMarks

Seen = Sequence[tuple[StepMarks, StepMarks]]  # (attention rank's, expert rank's) of some steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch of `rows` that is alone in the pipeline.

    Packing and unpacking by a rank are part of its stage. A transfer lasts from the end of sending
    until the receiver continues.
    """

    rows: int
    attention_s: float
    experts_s: float
    transfer_s: float  # mean of both directions

    @property
    def slower_s(self) -> float:
        """Returns T_f, the time of the slower stage."""
        return max(self.attention_s, self.experts_s)

    def delayed(self, delay_s: float) -> StageTimes:
        return StageTimes(
            rows=self.rows,
            attention_s=self.attention_s,
            experts_s=self.experts_s,
            transfer_s=self.transfer_s + delay_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Steps with `num_micro_batches` of `rows` each.

    `step_s` is the time of the layers, and `whole_s` also includes the head. `formula_s` and
    `model_s` are predictions from stage times that were measured separately from these steps.
    """

    delay_s: float
    num_micro_batches: int
    rows: int
    num_steps: int
    step_s: float
    whole_s: float
    formula_s: float
    model_s: float
    is_full: bool  # the formula is for this case

    @property
    def tokens_per_s(self) -> float:
        return self.num_micro_batches * self.rows / self.whole_s

    @property
    def formula_error(self) -> float:
        return self.step_s / self.formula_s - 1

    @property
    def model_error(self) -> float:
        return self.step_s / self.model_s - 1


def stage_times(rows: int, seen: Seen) -> StageTimes:
    """Computes stage times from steps of one micro-batch, in which stages do not overlap.

    They are means over each step's layers, and then the lower quartile of the steps.
    """
    attention, experts, transfers = [], [], []
    for ours, theirs in seen:
        layers = range(len(theirs.sent))
        experts.append(_mean_s([theirs.sent[i] - theirs.received[i] for i in layers]))
        attention.append(_mean_s([ours.sent[i] - ours.received[i - 1] for i in layers[1:]]))
        there = [theirs.received[i] - ours.sent[i] for i in layers]
        back = [ours.received[i] - theirs.sent[i] for i in layers]
        transfers.append(_mean_s([*there, *back]))
    return StageTimes(
        rows=rows,
        attention_s=usual(attention),
        experts_s=usual(experts),
        transfer_s=usual(transfers),
    )


def point(
    seen: Seen, times: StageTimes, num_layers: int, num_micro_batches: int, delay_s: float
) -> Point:
    """Returns the usual step; `times` are those of a micro-batch without delay."""
    delayed = times.delayed(delay_s)
    round_trip_s = delayed.attention_s + delayed.experts_s + 2 * delayed.transfer_s
    return Point(
        delay_s=delay_s,
        num_micro_batches=num_micro_batches,
        rows=times.rows,
        num_steps=len(seen),
        step_s=usual([1e-9 * (ours.end - ours.start) for ours, _ in seen]),
        whole_s=usual([1e-9 * (ours.whole_end - ours.start) for ours, _ in seen]),
        formula_s=round_trip_s + delayed.slower_s * (num_micro_batches * num_layers - 1),
        model_s=_expected_s(delayed, num_layers, num_micro_batches),
        is_full=num_micro_batches * delayed.slower_s >= 0.95 * round_trip_s,
    )


def _expected_s(times: StageTimes, num_layers: int, num_micro_batches: int) -> float:
    """Returns the time by the formula, or by its extension if a micro-batch returns later than its
    turn.

    A layer then takes as long as a round trip. Added delays are latencies: several messages are
    under way at once.
    """
    round_trip_s = times.attention_s + times.experts_s + 2 * times.transfer_s
    layer_s = max(num_micro_batches * times.slower_s, round_trip_s)
    return (num_layers - 1) * layer_s + round_trip_s + (num_micro_batches - 1) * times.slower_s


def _mean_s(nanoseconds: Sequence[int]) -> float:
    return 1e-9 * sum(nanoseconds) / len(nanoseconds)
