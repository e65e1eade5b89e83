"""Utilisation of the two pools, computed from the records of a timeline. Pure functions.

A step lasts from the first attention rank's start to the last one's end. With A and E ranks in the
pools, and the time of all steps together as `elapsed`:

    bubble of a pool        1 - (busy time of its ranks) / (number of ranks * elapsed)
    exposed communication   (time attention ranks wait for a combine) / (A * elapsed)
    exposed transfer        the part of that in which no expert rank is busy either

Busy covers every stage except waiting (`WAITING`) and the step itself; the stages of one rank do
not overlap. In the order of the pipeline, a rank that waits has nothing else to do. All times must
be on one clock; only the exposed transfer and the bounds of a step depend on how well the clocks
agree.

S = steps, N = records of a rank, I = intervals
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline.timeline_recorder import (
    RECORD_DTYPE,
    WAITING,
    Records,
    Role,
    Stage,
    Track,
)

Tracks = Mapping[Track, Records]  # all on one clock
_Times = npt.NDArray[np.int64]
_NO_BUSY_STAGES = np.array([Stage.STEP, *sorted(WAITING)], dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTotal:
    """One stage of one rank, over all steps."""

    track: Track
    stage: Stage
    num_records: int
    num_rows: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """One pool over all steps."""

    role: Role
    num_ranks: int
    busy_ns: int  # all its ranks together
    bubble_ratio: float  # 0 to 1
    slowest: Track  # the rank with the most busy time
    # its busy time divided by the mean of the others, minus 1; 0 for a single rank
    slowest_excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMetrics:
    """Metrics of the pipeline over the steps of a timeline."""

    steps: tuple[int, ...]  # their numbers, in order; at least one
    elapsed_ns: int  # total of all steps, without the gaps between them
    slowest_step: tuple[int, int]  # its number and its ns
    pools: tuple[PoolMetrics, ...]  # attention, expert; a pool without records is missing
    exposed_communication_ratio: float
    exposed_transfer_ratio: float
    steps_by_micro_batches: dict[int, int]
    stages: tuple[StageTotal, ...]  # by rank, then stage

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def pool(self, role: Role) -> PoolMetrics | None:
        return next((pool for pool in self.pools if pool.role is role), None)

    def busy_ratios(self) -> dict[Track, float]:
        """Returns the share of the steps' time in which each rank of a pool was busy."""
        busy_ns: dict[Track, int] = {}
        for total in self.stages:
            if total.track.role is not Role.COORDINATOR:
                own = 0 if total.stage in _NO_BUSY_STAGES else total.total_ns
                busy_ns[total.track] = busy_ns.get(total.track, 0) + own
        return {track: min(1.0, ns / max(1, self.elapsed_ns)) for track, ns in busy_ns.items()}


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The start and end of each step, in the order of their numbers."""

    steps_S: npt.NDArray[np.uint32]
    starts_S: _Times
    ends_S: _Times

    def elapsed_ns(self) -> int:
        return int((self.ends_S - self.starts_S).sum())

    def slowest(self) -> tuple[int, int]:
        """-> (number, ns) of the longest step."""
        place = int((self.ends_S - self.starts_S).argmax())
        return int(self.steps_S[place]), int(self.ends_S[place] - self.starts_S[place])


def measure(tracks: Tracks) -> TimelineMetrics:
    """Computes the metrics of all whole steps in `tracks`.

    Raises TimelineError if there is no whole step.
    """
    bounds = step_bounds(tracks)
    inside = {
        track: records[np.isin(records["step"], bounds.steps_S)]
        for track, records in tracks.items()
    }
    elapsed_ns = bounds.elapsed_ns()
    pools = [_pool(role, inside, elapsed_ns) for role in (Role.ATTENTION, Role.EXPERT)]
    waits_ns, transfers_ns = _exposed(inside)
    num_attention_ranks = len(_ranks(inside, Role.ATTENTION))
    capacity_ns = max(1, num_attention_ranks * elapsed_ns)
    return TimelineMetrics(
        steps=tuple(bounds.steps_S.tolist()),
        elapsed_ns=elapsed_ns,
        slowest_step=bounds.slowest(),
        pools=tuple(pool for pool in pools if pool is not None),
        exposed_communication_ratio=waits_ns / capacity_ns,
        exposed_transfer_ratio=transfers_ns / capacity_ns,
        steps_by_micro_batches=_steps_by_micro_batches(inside),
        stages=tuple(_stage_totals(inside)),
    )


def step_bounds(tracks: Tracks) -> StepBounds:
    """Finds the steps that an attention rank has finished, with their start and end."""
    steps = [
        records[records["stage"] == Stage.STEP]
        for track, records in tracks.items()
        if track.role is Role.ATTENTION
    ]
    whole = _joined(steps)
    if len(whole) == 0:
        raise TimelineError("the timeline holds no complete step of an attention rank")
    numbers_S, places_N = np.unique(whole["step"], return_inverse=True)
    starts_S = np.full(len(numbers_S), np.iinfo(np.int64).max)
    ends_S = np.full(len(numbers_S), np.iinfo(np.int64).min)
    np.minimum.at(starts_S, places_N, whole["start_ns"])
    np.maximum.at(ends_S, places_N, whole["end_ns"])
    return StepBounds(numbers_S, starts_S, ends_S)


def _ranks(tracks: Tracks, role: Role) -> list[Track]:
    return sorted(track for track in tracks if track.role is role)


def _joined(parts: Sequence[Records]) -> Records:
    return np.concatenate(parts) if parts else np.empty(0, RECORD_DTYPE)


def _busy(records: Records) -> Records:
    chosen: Records = records[~np.isin(records["stage"], _NO_BUSY_STAGES)]
    return chosen


def _total_ns(records: Records) -> int:
    return int((records["end_ns"] - records["start_ns"]).sum())


def _pool(role: Role, tracks: Tracks, elapsed_ns: int) -> PoolMetrics | None:
    busy_ns = {track: _total_ns(_busy(tracks[track])) for track in _ranks(tracks, role)}
    if not busy_ns:
        return None
    total_ns = sum(busy_ns.values())
    slowest = max(busy_ns, key=lambda track: busy_ns[track])
    mean_of_others = (total_ns - busy_ns[slowest]) / max(1, len(busy_ns) - 1)
    bubble = 1 - total_ns / max(1, len(busy_ns) * elapsed_ns)
    return PoolMetrics(
        role=role,
        num_ranks=len(busy_ns),
        busy_ns=total_ns,
        bubble_ratio=min(1.0, max(0.0, bubble)),
        slowest=slowest,
        slowest_excess=busy_ns[slowest] / mean_of_others - 1 if mean_of_others > 0 else 0.0,
    )


def _exposed(tracks: Tracks) -> tuple[int, int]:
    """-> (ns of waiting for a combine, ns of it in which no expert rank is busy)."""
    waits = [
        tracks[track][tracks[track]["stage"] == Stage.WAIT_COMBINE]
        for track in _ranks(tracks, Role.ATTENTION)
    ]
    experts = [_busy(tracks[track]) for track in _ranks(tracks, Role.EXPERT)]
    all_waits = _joined(waits)
    if len(all_waits) == 0:
        return 0, 0
    total_ns = _total_ns(all_waits)
    all_busy = _joined(experts)
    if len(all_busy) == 0:
        return total_ns, total_ns
    covered_ns = covered(
        all_busy["start_ns"], all_busy["end_ns"], all_waits["start_ns"], all_waits["end_ns"]
    )
    return total_ns, total_ns - covered_ns


def covered(starts_I: _Times, ends_I: _Times, starts_N: _Times, ends_N: _Times) -> int:
    """Returns how much of the intervals N lies in the union of the intervals I, in ns.

    I = [0, 4) [2, 6) [8, 9) is [0, 6) [8, 9); N = [5, 10) shares 1 + 1 with it.
    """
    order = np.argsort(starts_I, kind="stable")
    starts, ends = starts_I[order], np.maximum.accumulate(ends_I[order])
    is_first = np.concatenate(([True], starts[1:] > ends[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    starts, ends = starts[is_first], ends[is_last]
    # before(t) is the part of the union before t, exact in int64.
    lengths = np.concatenate(([0], np.cumsum(ends - starts)))

    def before(times: _Times) -> _Times:
        place = np.searchsorted(starts, times, side="right")  # unions that start at t or before
        last = np.maximum(place - 1, 0)
        overhang = np.maximum(ends[last] - times, 0)  # the part of the last union that lies after t
        result: _Times = lengths[place] - np.where(place > 0, overhang, 0)
        return result

    return int((before(ends_N) - before(starts_N)).sum())


def _steps_by_micro_batches(tracks: Tracks) -> dict[int, int]:
    """Returns {m: number of steps with m micro-batches}, from the largest index seen in a step."""
    largest: dict[int, int] = {}
    for records in tracks.values():
        of_one = records[records["micro_batch"] >= 0]
        numbers, places = np.unique(of_one["step"], return_inverse=True)
        top = np.zeros(len(numbers), dtype=np.int8)
        np.maximum.at(top, places, of_one["micro_batch"])
        for step, index in zip(numbers.tolist(), top.tolist(), strict=True):
            largest[step] = max(largest.get(step, 0), index + 1)
    return dict(sorted(Counter(largest.values()).items()))


def _stage_totals(tracks: Tracks) -> Sequence[StageTotal]:
    totals = []
    for track in sorted(tracks):
        records = tracks[track]
        for number in np.unique(records["stage"]).tolist():
            of_stage: Records = records[records["stage"] == number]
            totals.append(
                StageTotal(
                    track=track,
                    stage=Stage(number),
                    num_records=len(of_stage),
                    num_rows=int(of_stage["rows"].sum(dtype=np.int64)),
                    total_ns=_total_ns(of_stage),
                )
            )
    return totals
