"""The use of the pools over the last steps, from ranks that report at different times."""

from __future__ import annotations

import pytest

from moe_serve.engine.request.stats import MicroBatchCount, PoolStats
from moe_serve.engine.watch.recent_pools import RecentPools
from moe_serve.pipeline.timeline.pool_metrics import measure
from moe_serve.pipeline.timeline.timeline_recorder import Role, Stage, Track
from pictures.timeline_figure import SimulatedPipeline, StageTimes


def test_before_the_first_step() -> None:
    assert RecentPools().stats() == PoolStats()


def test_the_last_whole_steps_count() -> None:
    """12 steps and a window of 4: step 11 may be incomplete, so steps 7 to 10 count."""
    slow = Track(Role.EXPERT, 1)
    pipeline = SimulatedPipeline(1, 2, 3, StageTimes(slow_ranks={slow: 1.5}))
    recent = RecentPools(num_steps=4)
    for step in range(12):
        pipeline.run_step(step, 2)
        recent.count_step(2, "predicted best")
    tracks = pipeline.tracks()
    for track, records in tracks.items():
        for first in range(0, 12, 5):  # in three parts
            is_in_part = (records["step"] >= first) & (records["step"] < first + 5)
            recent.add(track, records[is_in_part], offset_ns=1000)
    stats = recent.stats()
    expected = measure({t: r[(r["step"] >= 7) & (r["step"] <= 10)] for t, r in tracks.items()})
    assert [use.bubble_ratio for use in stats.pools] == [p.bubble_ratio for p in expected.pools]
    assert stats.exposed_communication_ratio == expected.exposed_communication_ratio
    assert (stats.pools[1].pool, stats.pools[1].slowest_rank) == ("expert", 1)
    assert stats.pools[1].slowest_excess == pytest.approx(0.5, abs=0.05)
    seconds = {use.stage: use.seconds for use in stats.stages}
    totals = {(t.track, t.stage): t.total_ns * 1e-9 / 4 for t in expected.stages}
    assert seconds["dispatch"] == totals[Track(Role.ATTENTION, 0), Stage.DISPATCH]
    two = [totals[rank, Stage.EXPERTS] for rank in (Track(Role.EXPERT, 0), slow)]
    assert two[0] < two[1] and seconds["experts"] == pytest.approx(sum(two) / 2), "their mean"
    count = MicroBatchCount(micro_batches=2, reason="predicted best", num_steps=12)
    assert (stats.steps, stats.micro_batches) == ((count,), 2)


def test_a_rank_that_lags_or_died_holds_nothing_up() -> None:
    pipeline, recent = SimulatedPipeline(1, 2, 2), RecentPools(num_steps=4)
    for step in range(20):
        pipeline.run_step(step, 1)
    for track, records in pipeline.tracks().items():
        is_dead = track == Track(Role.EXPERT, 1)
        recent.add(track, records[records["step"] < (2 if is_dead else 20)])
    assert len(recent.stats().pools) == 2, "the others are counted all the same"
    recent.forget(Track(Role.EXPERT, 1))
    assert [use.num_ranks for use in recent.stats().pools] == [1, 1]


def test_old_records_are_let_go() -> None:
    pipeline, recent = SimulatedPipeline(1, 1, 1), RecentPools(num_steps=2)
    for step in range(100):
        pipeline.run_step(step, 1)
    for track, records in pipeline.tracks().items():
        for step in range(100):
            recent.add(track, records[records["step"] == step])
    kept = {track: len(parts) for track, parts in recent._parts.items()}
    assert max(kept.values()) <= 5, kept
