"""Statistics of an engine, of its batch policy and of its ranks, for `/metrics` and dashboards.

The records of several engines add up: `total = one + other`. All are snapshots.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from experts.memory.memory_stats import MemoryStats
from moe_serve.cache.page_times import PageTimes
from moe_serve.cache.tiers.store import TierStats
from moe_serve.engine.request.draft_counts import DraftCounts
from moe_serve.engine.request.moves_stats import MovesStats
from moe_serve.engine.request.service_stats import ServiceStats
from moe_serve.engine.request.step_tokens import StepTokens

PolicyName = Literal["fifo", "balanced", "expert-aware"]
RankPhase = Literal["starting", "loading", "ready", "serving"]
Pool = Literal["attention", "expert"]
CellState = Literal[
    "starting",  # its ranks start and load
    "serving",
    "draining",  # its requests move away, and it stays
    "leaving",  # its requests move away, and then it ends
    "stopping",  # it has no requests any more, and its ranks end
    "failed",  # it could not start
]
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

    stage: (
        str  # dispatch; closed: the labels of `moe_serve.pipeline.timeline.timeline_recorder.Stage`
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """The figures of a batch policy, filled by the policy."""

    policy: PolicyName  # the policy in effect, so that a fallback to fifo is visible
    num_passed_over: int = 0  # times that a later request started before a waiting one
    activated_experts: float | None = None  # expected in the last step's micro-batches, all layers
    recall: float | None = None  # of the predictor, as measured; None: not measured
    is_predictor_on: bool | None = None  # None: no predictor
    num_learnt: int | None = None  # predictions learnt from; None: the predictor does not learn

    def __add__(self, other: PolicyStats) -> PolicyStats:
        """Engines share one predictor, so its figures are taken from the first."""
        experts = (self.activated_experts, other.activated_experts)
        known = [count for count in experts if count is not None]
        return replace(
            self,
            num_passed_over=self.num_passed_over + other.num_passed_over,
            activated_experts=sum(known) if known else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The requests and pages that an engine has now."""

    num_running: int = 0
    num_waiting: int = 0
    num_left_aside: int = 0  # waiting sequences that the policy skipped (see `Skipped`)
    num_pages: int = 0
    num_free_pages: int = 0  # held by no sequence; pages only in the prefix cache count as free
    num_cached_pages: int = 0  # in the prefix cache, used or not
    oldest_arrival: float | None = None  # of waiting requests, engine's clock; None: none wait

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - self.num_free_pages

    @property
    def used_share(self) -> float:
        """Share of the pages that sequences hold, 0 to 1."""
        return self.num_used_pages / max(1, self.num_pages)

    @classmethod
    def of_waiting(cls, arrivals: Sequence[float]) -> EngineLoad:
        """Returns the load of sequences that no engine has yet, by their times of arrival."""
        return cls(num_waiting=len(arrivals), oldest_arrival=min(arrivals, default=None))

    def __add__(self, other: EngineLoad) -> EngineLoad:
        arrivals = (self.oldest_arrival, other.oldest_arrival)
        return EngineLoad(
            num_running=self.num_running + other.num_running,
            num_waiting=self.num_waiting + other.num_waiting,
            num_left_aside=self.num_left_aside + other.num_left_aside,
            num_pages=self.num_pages + other.num_pages,
            num_free_pages=self.num_free_pages + other.num_free_pages,
            num_cached_pages=self.num_cached_pages + other.num_cached_pages,
            oldest_arrival=min((a for a in arrivals if a is not None), default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Counts of an engine since its start."""

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_evicted_pages: int = 0
    num_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # prompt tokens found there
    num_missed_tokens: int = 0  # prompt tokens not found there, counted once per request
    num_corrupted: int = 0  # sequences that ended because the model gave NaN or infinity
    page_times: PageTimes = PageTimes()
    step_tokens: StepTokens = StepTokens()
    drafts: DraftCounts = DraftCounts()

    def __add__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(
            num_preemptions=self.num_preemptions + other.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens + other.num_generated_tokens,
            num_evicted_pages=self.num_evicted_pages + other.num_evicted_pages,
            num_queried_tokens=self.num_queried_tokens + other.num_queried_tokens,
            num_hit_tokens=self.num_hit_tokens + other.num_hit_tokens,
            num_missed_tokens=self.num_missed_tokens + other.num_missed_tokens,
            num_corrupted=self.num_corrupted + other.num_corrupted,
            page_times=self.page_times + other.page_times,
            step_tokens=self.step_tokens + other.step_tokens,
            drafts=self.drafts + other.drafts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The load of one attention rank, filled by the coordinator."""

    name: str
    load: EngineLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The state of one rank of either pool, filled by the coordinator."""

    name: str  # expert-0
    pool: Pool
    phase: RankPhase
    num_restarts: int  # of its process, since the server began
    busy_ratio: float | None  # share of the last recorded steps in which it worked


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStatus:
    """The state of one cell: ranks that step together. Filled by the coordinator."""

    name: str  # cell-0
    role: str  # prefill, decode or both
    ranks: str  # 1A2E, as in `cells.layout`
    state: CellState = "serving"
    load: EngineLoad = EngineLoad()
    num_steps: int = 0
    num_lost_ranks: int = 0  # since the start
    outage_s: float = 0.0  # how long it has been unable to compute
    draining_ranks: tuple[str, ...] = ()  # attention ranks that drain by themselves
    note: str = ""  # why it failed, or what it waits for
    commands: tuple[str, ...] = ()  # that start the ranks for which it waits, one for each

    @property
    def is_draining(self) -> bool:
        """True if it gets no new requests, and its running ones move away."""
        return self.state in ("draining", "leaving")


ScaleAction = Literal[
    "add",  # cells are started
    "remove",  # cells leave
    "keep",  # the wanted number runs
    "hold",  # another number is wanted, but not possible now
    "failed",  # a cell that was added could not start
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStats:
    """The state of autoscaling, filled by `LiveScaler`. `last` is a sentence about the last
    decision other than `keep`, and `num_said` the number of such sentences so far.
    """

    policy: str
    wanted: Mapping[str, int]  # cells of each role that is scaled
    num_decisions: Mapping[ScaleAction, int]
    last: str = ""
    num_said: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine that is cheap to take from any thread."""

    num_steps: int = 0
    load: EngineLoad = EngineLoad()
    counts: EngineCounts = EngineCounts()
    is_alive: bool = True
    death: str | None = None  # why the engine is not alive
    last_turn_age_s: float | None = None  # since the engine thread's last pass of its loop
    last_error_age_s: float | None = None  # since a request failed; None: none has failed
    outage_s: float = 0.0  # how long ranks have been missing that every step needs
    tier: TierStats | None = None  # None: no KV tier
    expert_memory: MemoryStats | None = None  # None: all experts are in memory
    batching: PolicyStats | None = None  # None: no policy has run yet
    service: ServiceStats | None = None  # None: no service tiers
    pools: PoolStats | None = None  # None when attention and experts share a process
    ranks: tuple[RankLoad, ...] = ()  # attention ranks; empty in one process
    members: tuple[RankStatus, ...] = ()  # ranks of both pools, present or not
    cells: tuple[CellStatus, ...] = ()  # empty with one cell
    scaling: ScalingStats | None = None  # None: the number of cells does not follow the load
    moves: MovesStats | None = None  # of requests between cells; None with one cell
    num_lost_ranks: int = 0  # since the start; a rank lost twice counts twice
    last_loss: str = ""  # the last lost rank and the reason

    def __add__(self, other: EngineStats) -> EngineStats:
        """Adds the load, the counts and the policy of an engine that takes part in the same steps.
        All other fields stay."""
        policies = [policy for policy in (self.batching, other.batching) if policy is not None]
        return replace(
            self,
            num_steps=max(self.num_steps, other.num_steps),
            load=self.load + other.load,
            counts=self.counts + other.counts,
            tier=self.tier or other.tier,  # ranks share one
            batching=sum(policies[1:], policies[0]) if policies else None,
            service=self.service or other.service,  # ranks share one
        )

    def lost(self) -> EngineStats:
        """Returns the statistics of an engine that is lost: its counts, without its load."""
        batching = self.batching and replace(self.batching, activated_experts=None)
        return EngineStats(num_steps=self.num_steps, counts=self.counts, batching=batching)

    if not TYPE_CHECKING:  # names of version 0.2, kept until 0.4

        def __getattr__(self, name: str) -> object:
            for part in ("load", "counts"):
                if name in _FIELDS[part]:
                    text = f"stats.{name} is deprecated: read stats.{part}.{name}."
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    return getattr(getattr(self, part), name)
            raise AttributeError(f"EngineStats has no field {name}.")


_FIELDS = {
    "load": {field.name for field in fields(EngineLoad)},
    "counts": {field.name for field in fields(EngineCounts)},
}
