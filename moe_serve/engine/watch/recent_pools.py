"""Measures the use of the pools over the last steps, from the ranks' stage records."""

from __future__ import annotations

import threading
from collections import Counter, deque

import numpy as np

from moe_serve.engine.execute.step_timeline import StepTimeline, step_timeline
from moe_serve.engine.request.stats import (
    MicroBatchCount,
    MicroBatchReason,
    Pool,
    PoolStats,
    PoolUse,
    RankUse,
    StageUse,
)
from moe_serve.errors import TimelineError
from moe_serve.pipeline.timeline.pool_metrics import PoolMetrics, TimelineMetrics, measure
from moe_serve.pipeline.timeline.timeline_recorder import Records, Role, Stage, Track

_NUM_STEPS = 64
_POOLS: dict[Role, Pool] = {Role.ATTENTION: "attention", Role.EXPERT: "expert"}


class RecentPools:
    """Collects records on the engine thread. `stats` may be called on any thread.

    Ranks send records at their own times, so a step counts once every known rank has a record of a
    later step, or after `num_steps` more steps.
    """

    def __init__(self, num_steps: int = _NUM_STEPS) -> None:
        self._num_steps = num_steps
        self._lock = threading.Lock()
        self._parts: dict[Track, deque[Records]] = {}
        self._counts: Counter[tuple[int, MicroBatchReason]] = Counter()
        self._micro_batches: int | None = None
        self._reason: MicroBatchReason = "fixed"  # for the step that was counted last
        self._reasons: deque[tuple[int, MicroBatchReason]] = deque(maxlen=2 * num_steps)

    def count_step(self, micro_batches: int, reason: MicroBatchReason) -> None:
        """Counts a step that ran with `micro_batches` micro-batches."""
        with self._lock:
            self._micro_batches, self._reason = micro_batches, reason
            self._counts[micro_batches, reason] += 1

    def began(self, step: int) -> None:
        """Sets the number of the step that was counted last."""
        with self._lock:
            self._reasons.append((step, self._reason))

    def add(self, track: Track, records: Records, offset_ns: int = 0) -> None:
        """Adds a rank's records. Its clock plus `offset_ns` is the coordinator's."""
        if len(records) == 0:
            return
        shifted = records.copy()
        shifted["start_ns"] += offset_ns
        shifted["end_ns"] += offset_ns
        with self._lock:
            self._parts.setdefault(track, deque()).append(shifted)
            oldest = self._newest_step() - 2 * self._num_steps
            for parts in self._parts.values():
                while parts and int(parts[0]["step"].max()) < oldest:
                    parts.popleft()

    def forget(self, track: Track) -> None:
        """Removes a lost rank from its pool."""
        with self._lock:
            self._parts.pop(track, None)

    def stats(self) -> PoolStats:
        with self._lock:
            parts = {track: list(parts) for track, parts in self._parts.items() if parts}
            counts, micro_batches = dict(self._counts), self._micro_batches
        metrics = self._measure({track: np.concatenate(some) for track, some in parts.items()})
        return PoolStats(
            pools=tuple(_use(pool) for pool in metrics.pools) if metrics else (),
            ranks=_rank_uses(metrics) if metrics else (),
            stages=_stage_uses(metrics) if metrics else (),
            exposed_communication_ratio=metrics.exposed_communication_ratio if metrics else None,
            steps=tuple(
                MicroBatchCount(micro_batches=m, reason=reason, num_steps=num)
                for (m, reason), num in sorted(counts.items())
            ),
            micro_batches=micro_batches,
        )

    def last_step(self) -> StepTimeline | None:
        """Returns the newest step that an attention rank and all expert ranks have recorded
        completely."""
        with self._lock:
            parts = {track: list(parts) for track, parts in self._parts.items() if parts}
            reasons = dict(self._reasons)
        tracks = {track: np.concatenate(some) for track, some in parts.items()}
        whole = {track: _whole_steps(records) for track, records in tracks.items()}
        found = set().union(*(steps for t, steps in whole.items() if t.role is Role.ATTENTION))
        for track, steps in whole.items():
            if track.role is Role.EXPERT:
                found &= steps
        if not found:
            return None
        number = max(found)
        of_step = {track: records[records["step"] == number] for track, records in tracks.items()}
        named = {_name(track): of_step[track] for track in sorted(of_step) if len(of_step[track])}
        return step_timeline(number, named, reasons.get(number, "not known"))

    def _newest_step(self) -> int:
        return max(int(parts[-1]["step"].max()) for parts in self._parts.values() if parts)

    def _measure(self, tracks: dict[Track, Records]) -> TimelineMetrics | None:
        """Returns the metrics of the last complete steps; None if there are none."""
        if not tracks:
            return None
        newest = [int(records["step"].max()) for records in tracks.values()]
        # [last - num_steps, last): records of `last` itself may not have arrived yet.
        last = max(min(newest), max(newest) - self._num_steps)
        whole = {
            track: records[(records["step"] >= last - self._num_steps) & (records["step"] < last)]
            for track, records in tracks.items()
        }
        try:
            return measure(whole)
        except TimelineError:  # no complete step yet
            return None


def _use(pool: PoolMetrics) -> PoolUse:
    return PoolUse(
        pool=_POOLS[pool.role],
        num_ranks=pool.num_ranks,
        bubble_ratio=pool.bubble_ratio,
        slowest_rank=pool.slowest.index,
        slowest_excess=pool.slowest_excess,
    )


def _rank_uses(metrics: TimelineMetrics) -> tuple[RankUse, ...]:
    ratios = metrics.busy_ratios()
    return tuple(RankUse(name=_name(t), busy_ratio=ratio) for t, ratio in sorted(ratios.items()))


def _stage_uses(metrics: TimelineMetrics) -> tuple[StageUse, ...]:
    """Returns the mean time of each stage over the ranks that ran it in these steps."""
    totals_ns: dict[Stage, list[int]] = {}
    for total in metrics.stages:
        if total.track.role is not Role.COORDINATOR:
            totals_ns.setdefault(total.stage, []).append(total.total_ns)
    return tuple(
        StageUse(stage=stage.label, seconds=sum(ns) / (len(ns) * metrics.num_steps) * 1e-9)
        for stage, ns in sorted(totals_ns.items())
    )


def _whole_steps(records: Records) -> set[int]:
    return set(records["step"][records["stage"] == Stage.STEP].tolist())


def _name(track: Track) -> str:
    """Returns a rank's name, such as expert-0."""
    return f"{track.role.value}-{track.index}"
