"""Statistics on how well the pools of a disaggregated server are used, for `/metrics`."""

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
    """The use of one pool over the last recorded steps."""

    pool: Pool
    num_ranks: int
    bubble_ratio: float  # 0 to 1: share of the pool's time without work
    slowest_rank: int
    slowest_excess: float  # its busy time / mean of the other ranks - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """The use of one rank over the same steps."""

    name: str  # expert-0
    busy_ratio: float  # 0 to 1: share of the steps' time in which it worked


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """The time of one stage over the same steps."""

    stage: str  # dispatch; closed: the labels of `moe_serve.pipeline.timeline.timeline.Stage`
    seconds: float  # of one step, mean of the ranks that have the stage


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCount:
    """The number of steps with the same number of micro-batches for the same reason."""

    micro_batches: int
    reason: MicroBatchReason
    num_steps: int  # since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A snapshot of both pools, filled by the coordinator."""

    pools: tuple[PoolUse, ...] = ()  # empty until steps were recorded
    ranks: tuple[RankUse, ...] = ()  # likewise
    stages: tuple[StageUse, ...] = ()  # likewise
    exposed_communication_ratio: float | None = None  # None until steps were recorded
    steps: tuple[MicroBatchCount, ...] = ()
    micro_batches: int | None = None  # in the last step
