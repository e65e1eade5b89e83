"""Combines the ranks' step reports into metrics and the timeline, and chooses the micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from experts.memory.memory_stats import MemoryStats
from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.control.messages import StageSeconds, StepDone, StepServed
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.execute.step_timeline import StepTimeline
from moe_serve.engine.request.stats import MicroBatchReason, PoolStats
from moe_serve.engine.watch.recent_pools import RecentPools
from moe_serve.errors import ConfigError
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.micro_batch_choice import (
    MAX_MICRO_BATCHES,
    MicroBatchChoice,
    MicroBatchChooser,
)
from moe_serve.pipeline.costs.online_costs import OnlineCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepCosts, StepTiming
from moe_serve.pipeline.timeline.timeline_file import TimelineWriter
from moe_serve.pipeline.timeline.timeline_recorder import Role, Track, decode_records
from moe_serve.planning.calibration_file import read_calibration

_log = logging.getLogger(__name__)

_MAX_OPEN = 8  # steps whose expert ranks have not all reported


@dataclass(slots=True)
class _OpenPoolStep:
    """A step until all ranks have reported on it."""

    loads: Sequence[BatchLoad]
    choice: MicroBatchChoice
    num_expert_ranks: int
    seconds: float = 0.0
    attention: list[StageSeconds] = field(default_factory=list)
    experts: list[StageSeconds] = field(default_factory=list)
    is_sound: bool = True


class AnyChooser(Protocol):
    """Decides how many micro-batches each step has, and learns from its timing."""

    def choose(self, loads: Sequence[BatchLoad]) -> MicroBatchChoice: ...

    def observe(
        self, loads: Sequence[BatchLoad], choice: MicroBatchChoice, timing: StepTiming
    ) -> None: ...


class PoolWatch:
    """Watches the pools of ranks. Used by the engine thread; any thread may call `stats`.

    With `chooser` None there are always `fixed` micro-batches (or one a sequence, if those are
    fewer).
    """

    def __init__(
        self,
        chooser: AnyChooser | None,
        fixed: int,
        writer: TimelineWriter | None,
    ) -> None:
        self._chooser, self._fixed, self._writer = chooser, fixed, writer
        self._recent = RecentPools()
        self._open: dict[int, _OpenPoolStep] = {}
        self._next: _OpenPoolStep | None = None
        self._memories: dict[str, MemoryStats] = {}  # expert rank -> its memory
        self._past = MemoryStats()  # counts of lost ranks

    def choose(self, plans: Mapping[str, StepPlan], num_expert_ranks: int) -> int:
        """Returns the number of micro-batches of the next step."""
        loads = [BatchLoad.of(plan.slices) for plan in plans.values()]
        reason: MicroBatchReason = "fixed"
        if self._chooser is not None:
            choice = self._chooser.choose(loads)
            reason = choice.reason
        else:
            most = max(load.num_sequences for load in loads)
            choice = MicroBatchChoice(min(self._fixed, most), (), "predicted best")
        self._recent.count_step(choice.num_micro_batches, reason)
        self._next = _OpenPoolStep(loads, choice, num_expert_ranks)
        return choice.num_micro_batches

    def began(self, step: int) -> None:
        """Notes the number of the step chosen for. A repeated step is not recorded."""
        opened, self._next = self._next, None
        if opened is not None:
            self._open[step] = opened
            self._recent.began(step)
            while len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]

    def heard(self, name: str, report: StepDone | StepServed, offset_ns: int) -> None:
        """Records a rank's report at the end of a step. Its clock plus `offset_ns` is ours."""
        track = track_of(name)
        if report.records:
            taken = decode_records(report.records)
            self._recent.add(track, taken.records, offset_ns)
            if self._writer is not None:
                self._writer.write(track, taken.records, offset_ns, taken.num_lost)
        if isinstance(report, StepServed) and report.memory is not None:
            before = self._memories.get(name)
            if before is not None and report.memory.num_visits < before.num_visits:
                self._end_memory(name)  # the rank has restarted
            self._memories[name] = report.memory
        opened = self._open.get(report.step)
        if opened is not None:
            pool = opened.experts if track.role is Role.EXPERT else opened.attention
            pool.append(report.seconds)
            self._close(report.step, opened)

    def ended(self, step: int, seconds: float, is_sound: bool) -> None:
        """Notes that all tokens of a step are here. `is_sound` is False if it failed or is
        repeated.
        """
        opened = self._open.get(step)
        if opened is not None and is_sound:
            opened.seconds = seconds
            self._close(step, opened)
        elif opened is not None:
            del self._open[step]

    def forget(self, name: str) -> None:
        """Forgets a lost rank."""
        self._recent.forget(track_of(name))

    def keep_experts(self, names: Collection[str]) -> None:
        """Keeps the expert memories of these ranks only."""
        for name in self._memories.keys() - set(names):
            self._end_memory(name)

    @property
    def expert_memory(self) -> MemoryStats | None:
        """Returns the sum over all expert ranks, as of the end of their last steps.

        Counts never shrink: those of lost ranks stay in them.
        """
        each = list(self._memories.values())
        if not each and not self._past.num_visits:
            return None
        return sum(each, self._past)

    def stats(self) -> PoolStats:
        return self._recent.stats()

    def last_step(self) -> StepTimeline | None:
        """Returns the newest step recorded on all ranks. On any thread."""
        return self._recent.last_step()

    def close(self) -> None:
        """Ends the timeline. A disk error is logged and keeps nothing else from ending."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except OSError as error:
            why = error.strerror or error
            _log.warning(
                "the timeline %s is incomplete, as it could not be written: %s",
                writer.path,
                why,
            )

    def _end_memory(self, name: str) -> None:
        counted = self._memories.pop(name)
        self._past += replace(counted, budget_bytes=0, resident_bytes=0)

    def _close(self, step: int, opened: _OpenPoolStep) -> None:
        if not opened.seconds or len(opened.experts) < opened.num_expert_ranks:
            return
        del self._open[step]
        if self._chooser is None or not opened.attention:
            return
        slowest = max(opened.attention, key=lambda seconds: seconds.busy)
        timing = StepTiming(
            seconds=opened.seconds,
            attention_s=slowest.busy,
            experts_s=max(seconds.busy for seconds in opened.experts),
            wait_s=slowest.waiting,
        )
        self._chooser.observe(opened.loads, opened.choice, timing)


def track_of(name: str) -> Track:
    """Returns the track of a rank's name: `expert-1` -> expert 1."""
    role, _, index = name.rpartition("-")
    return Track(Role(role), int(index))


def make_watch(config: EngineConfig, model: ClusterModel) -> PoolWatch:
    """Makes a watch with fixed micro-batches, a calibration or costs learned online. Raises
    ConfigError."""
    cuts, cluster = config.pipeline.micro_batches, config.cluster
    writer = None
    if config.pipeline.timeline is not None:
        path = Path(config.pipeline.timeline).expanduser()
        try:
            writer = TimelineWriter(path)
        except OSError as error:
            raise ConfigError(
                f"pipeline.timeline: cannot write {path}: {error.strerror}."
            ) from error
    if cuts != "auto":
        return PoolWatch(None, cuts, writer)
    costs: StepCosts = OnlineCosts(len(sparse_layers(model.spec)))
    if cluster.calibration is not None:
        measured = read_calibration(Path(cluster.calibration).expanduser()).costs
        has_shards = cluster.attention_tp in measured.shard_counts
        costs = measured.with_shards(cluster.attention_tp) if has_shards else measured
    ranks = Ranks(
        num_attention=cluster.attention_ranks,
        num_experts=cluster.expert_ranks,
        is_router_on_experts=model.is_routing_on_experts,
    )
    return PoolWatch(MicroBatchChooser(costs, ranks), MAX_MICRO_BATCHES, writer)
