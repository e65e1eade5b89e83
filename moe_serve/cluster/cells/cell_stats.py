"""Adds up the statistics of cells, and gives their ranks names that say the cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from experts.memory.memory_stats import MemoryStats
from moe_serve.cluster.cells.cell import Cell, cell_name
from moe_serve.cluster.cells.moves import Moves
from moe_serve.engine.request.stats import (
    CellStatus,
    EngineLoad,
    EngineStats,
    MicroBatchCount,
    MicroBatchReason,
    PoolStats,
    PoolUse,
    StageUse,
)


def stats_of(cells: Sequence[Cell], moves: Moves) -> EngineStats:
    """Returns the statistics of a server. On any thread."""
    each = [cell.stats() for cell in cells]
    last = max(range(len(cells)), key=lambda index: cells[index].lost_at)
    total = sum(each[1:], each[0])
    arrivals = [sequence.request.arrival_time for sequence in moves.waiting]
    memories = [stats.expert_memory for stats in each if stats.expert_memory is not None]
    return replace(
        total,
        load=total.load + EngineLoad.of_waiting(arrivals),
        num_steps=sum(stats.num_steps for stats in each),
        ranks=tuple(
            replace(rank, name=_name(index, rank.name))
            for index, stats in enumerate(each)
            for rank in stats.ranks
        ),
        members=tuple(
            replace(rank, name=_name(index, rank.name))
            for index, stats in enumerate(each)
            for rank in stats.members
        ),
        num_lost_ranks=sum(stats.num_lost_ranks for stats in each),
        last_loss=each[last].last_loss,
        outage_s=min(stats.outage_s for stats in each),
        pools=pools_of([stats.pools for stats in each if stats.pools is not None]),
        expert_memory=sum(memories, MemoryStats()) if memories else None,
        moves=moves.stats(),
        cells=tuple(_status(cell, stats) for cell, stats in zip(cells, each, strict=True)),
    )


def _status(cell: Cell, stats: EngineStats) -> CellStatus:
    return CellStatus(
        name=cell.name,
        role=cell.shape.role,
        ranks=cell.shape.ranks,
        load=stats.load,
        num_steps=stats.num_steps,
        num_lost_ranks=stats.num_lost_ranks,
        outage_s=stats.outage_s,
        is_draining=cell.is_draining,
    )


def pools_of(each: Sequence[PoolStats]) -> PoolStats:
    """Combines the pools of cells: means of shares and times, weighted by ranks, and sums of
    counts. The slowest rank is the one that lags most within its own cell."""
    uses = [use for stats in each for use in stats.pools]
    stages = [use for stats in each for use in stats.stages]
    exposed = [s.exposed_communication_ratio for s in each]
    counts: Counter[tuple[int, MicroBatchReason]] = Counter()
    for count in (count for stats in each for count in stats.steps):
        counts[count.micro_batches, count.reason] += count.num_steps
    return PoolStats(
        pools=tuple(
            _pool([use for use in uses if use.pool == pool])
            for pool in dict.fromkeys(use.pool for use in uses)
        ),
        ranks=tuple(
            replace(use, name=_name(index, use.name))
            for index, stats in enumerate(each)
            for use in stats.ranks
        ),
        stages=tuple(
            StageUse(stage=stage, seconds=_mean([u.seconds for u in stages if u.stage == stage]))
            for stage in dict.fromkeys(use.stage for use in stages)
        ),
        exposed_communication_ratio=_mean([ratio for ratio in exposed if ratio is not None])
        if any(ratio is not None for ratio in exposed)
        else None,
        steps=tuple(
            MicroBatchCount(micro_batches=cuts, reason=reason, num_steps=num_steps)
            for (cuts, reason), num_steps in sorted(counts.items())
        ),
        micro_batches=max([s.micro_batches for s in each if s.micro_batches], default=None),
    )


def _pool(uses: Sequence[PoolUse]) -> PoolUse:
    num_ranks = sum(use.num_ranks for use in uses)
    slowest = max(uses, key=lambda use: use.slowest_excess)
    idle = sum(use.bubble_ratio * use.num_ranks for use in uses) / num_ranks
    return replace(slowest, num_ranks=num_ranks, bubble_ratio=idle)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _name(index: int, rank: str) -> str:
    return f"{cell_name(index)}/{rank}"
