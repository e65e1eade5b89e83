"""How well the pools of a disaggregated server are used, for `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pool = Literal["attention", "expert"]
MicroBatchReason = Literal[
    "fixed",  # the configuration says so
    "one sequence",
    "not measured yet",
    "trying out",
    "predicted best",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """One pool, over the last steps that were recorded."""

    pool: Pool
    num_ranks: int
    bubble_ratio: float  # 0 to 1: share of the pool's time without work
    slowest_rank: int
    slowest_excess: float  # its busy time over the mean of the other ranks, less 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """One rank, over the same steps."""

    name: str  # expert-0
    busy_ratio: float  # 0 to 1: share of the steps' time in which it worked


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """One stage of a step, over the same steps."""

    stage: str  # dispatch; closed: the labels of `moe_serve.pipeline.timeline.timeline.Stage`
    seconds: float  # of one step, mean of the ranks that have the stage


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCount:
    """Steps with the same number of micro-batches for the same reason."""

    micro_batches: int
    reason: MicroBatchReason
    num_steps: int  # since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A snapshot of both pools; the coordinator fills it."""

    pools: tuple[PoolUse, ...] = ()  # empty until steps were recorded
    ranks: tuple[RankUse, ...] = ()  # the same
    stages: tuple[StageUse, ...] = ()  # the same
    exposed_communication_ratio: float | None = None  # None as long
    steps: tuple[MicroBatchCount, ...] = ()
    micro_batches: int | None = None  # of the last step
