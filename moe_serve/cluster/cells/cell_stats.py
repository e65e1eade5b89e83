"""Adds up the statistics of cells, and gives their ranks names that say the cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from experts.memory.memory_stats import MemoryStats
from moe_serve.cluster.cells.cell import Cell
from moe_serve.cluster.cells.moves import CellMoves
from moe_serve.engine.request.stats import (
    CellState,
    CellStatus,
    EngineLoad,
    EngineStats,
    MicroBatchCount,
    MicroBatchReason,
    PoolStats,
    PoolUse,
    StageUse,
)

NOTHING = EngineStats()


def stats_of(
    cells: Sequence[Cell],
    moves: CellMoves,
    past: EngineStats = NOTHING,
    changing: Sequence[CellStatus] = (),
) -> EngineStats:
    """Returns the statistics of a server. Safe from any thread. For `past` see `past_of`;
    `changing` are the cells that do not serve.
    """
    each = {cell: cell.stats() for cell in cells}
    last = max(cells, key=lambda cell: cell.lost_at)
    total = sum(each.values(), past)
    arrivals = [sequence.request.arrival_time for sequence in moves.waiting]
    pools = {cell.name: stats.pools for cell, stats in each.items() if stats.pools is not None}
    more = () if past.pools is None else (past.pools,)
    drained = moves.draining_ranks
    statuses = [*(_status(cell, stats, drained) for cell, stats in each.items()), *changing]
    return replace(
        total,
        load=total.load + EngineLoad.of_waiting(arrivals),
        num_steps=past.num_steps + sum(stats.num_steps for stats in each.values()),
        ranks=tuple(
            replace(rank, name=f"{cell.name}/{rank.name}")
            for cell, stats in each.items()
            for rank in stats.ranks
        ),
        members=tuple(
            replace(rank, name=f"{cell.name}/{rank.name}")
            for cell, stats in each.items()
            for rank in stats.members
        ),
        num_lost_ranks=past.num_lost_ranks + sum(s.num_lost_ranks for s in each.values()),
        last_loss=each[last].last_loss or past.last_loss,
        outage_s=min(stats.outage_s for stats in each.values()),
        pools=pools_of(pools, more),
        expert_memory=_memory([past, *each.values()]),
        moves=moves.stats(),
        cells=tuple(sorted(statuses, key=lambda status: (len(status.name), status.name))),
    )


def past_of(past: EngineStats, left: EngineStats) -> EngineStats:
    """Adds the counts of a cell that has left, so that counts never shrink."""
    kept, memory, pools = left.lost(), left.expert_memory, left.pools
    if memory is not None:
        memory = replace(memory, budget_bytes=0, resident_bytes=0)
    kept = replace(kept, expert_memory=memory)
    steps = [PoolStats(steps=each.steps) for each in (past.pools, pools) if each is not None]
    return replace(
        past + kept,
        num_steps=past.num_steps + left.num_steps,
        num_lost_ranks=past.num_lost_ranks + left.num_lost_ranks,
        last_loss=left.last_loss or past.last_loss,
        expert_memory=_memory([past, kept]),
        pools=PoolStats(steps=pools_of({}, steps).steps),
    )


def _memory(each: Sequence[EngineStats]) -> MemoryStats | None:
    memories = [stats.expert_memory for stats in each if stats.expert_memory is not None]
    return sum(memories, MemoryStats()) if memories else None


def _status(cell: Cell, stats: EngineStats, drained: Sequence[tuple[int, str]]) -> CellStatus:
    state: CellState = "draining" if cell.is_draining else "serving"
    return CellStatus(
        name=cell.name,
        role=cell.shape.role,
        ranks=cell.shape.ranks,
        state="leaving" if cell.is_leaving else state,
        load=stats.load,
        num_steps=stats.num_steps,
        num_lost_ranks=stats.num_lost_ranks,
        outage_s=stats.outage_s,
        draining_ranks=tuple(sorted(rank for index, rank in drained if index == cell.index)),
    )


def pools_of(by_cell: Mapping[str, PoolStats], more: Sequence[PoolStats] = ()) -> PoolStats:
    """Combines the pools of cells: means of shares and times, weighted by ranks, and sums of
    counts. The slowest rank is the one that lags most within its own cell. `more` only has
    counts."""
    each = [*by_cell.values(), *more]
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
            replace(use, name=f"{cell}/{use.name}")
            for cell, stats in by_cell.items()
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
