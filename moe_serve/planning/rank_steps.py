"""Measures the steps of real ranks on this machine, with the coordinator and all messages.

A layout is started as a server starts it, and serves random requests in closed loops of several
sizes. Every step gives a sample: what each attention rank had to compute, how long it took from the
end of the step before, and how long the slowest attention rank computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.control.messages import StepDone, StepServed
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.started_cells import build_cells
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.cell_config import config_of_cell
from moe_serve.config.cells import CellsConfig, CellShape
from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.model.step_plan import StepPlan
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES, MicroBatchChooser
from moe_serve.pipeline.costs.online_costs import OnlineCosts
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks
from moe_serve.planning.whole_steps import RandomRequests

BATCHES = (1, 2, 4, 8, 16, 32)  # requests in progress
_MOST_SEQUENCES = 64  # of an attention rank
_PAIR_BATCHES = (2, 4, 8)  # requests in progress in each of two cells
_LEAST_STEPS, _WARM_STEPS = 8, 3  # of each loop; those that do not count
_LEAST_TOKENS = 50  # of each rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A step. `loads`: of the attention ranks that had work; `seconds`: since the end of the step
    before; `attention_s`: that the slowest attention rank computed in it."""

    loads: tuple[BatchLoad, ...]
    seconds: float
    attention_s: float
    num_micro_batches: int


@dataclass(frozen=True, slots=True)
class RankSteps:
    """Steps of one layout. `cores`: that all of its processes kept busy, in the mean."""

    steps: tuple[RankStep, ...]
    cores: float


@dataclass(slots=True)
class _Begun:
    loads: tuple[BatchLoad, ...]
    num_micro_batches: int
    attention_s: float = 0.0


class _NotingWatch(PoolWatch):
    """Chooses micro-batches as a server does, and notes what every step did."""

    def __init__(self, chooser: MicroBatchChooser) -> None:
        super().__init__(chooser, MAX_MICRO_BATCHES, None)
        self._chosen: _Begun | None = None
        self._begun: dict[int, _Begun] = {}
        self.ended_steps: list[tuple[float, _Begun]] = []  # (time of the end, step)

    def choose(self, plans: Mapping[str, StepPlan], num_expert_ranks: int) -> int:
        count = super().choose(plans, num_expert_ranks)
        loads = tuple(BatchLoad.of(plan.slices) for plan in plans.values())
        self._chosen = _Begun(loads, count)
        return count

    def began(self, step: int) -> None:
        super().began(step)
        if self._chosen is not None:
            self._begun[step], self._chosen = self._chosen, None

    def heard(self, name: str, report: StepDone | StepServed, offset_ns: int) -> None:
        super().heard(name, report, offset_ns)
        begun = self._begun.get(report.step)
        if begun is not None and isinstance(report, StepDone):
            begun.attention_s = max(begun.attention_s, report.seconds.busy)

    def ended(self, step: int, seconds: float, is_sound: bool) -> None:
        super().ended(step, seconds, is_sound)
        begun = self._begun.pop(step, None)
        if begun is not None and is_sound:
            self.ended_steps.append((time.perf_counter(), begun))


class StartedLayout:
    """The ranks of a layout while they are measured. `engine` may serve other requests between two
    measurements."""

    def __init__(self, engine: DrivenEngine, watch: _NotingWatch, requests: RandomRequests) -> None:
        self.engine, self._watch, self._requests = engine, watch, requests
        self._open: set[str] = set()

    def measure(self, budget_s: float, batches: Sequence[int] = BATCHES) -> RankSteps:
        """Serves closed loops of all sizes with short and with long prompts, about `budget_s`
        seconds a size, and leaves the engine without requests."""
        steps: list[RankStep] = []
        before, began = _cpu_seconds(), time.perf_counter()
        for most in batches:
            for is_long in (False, True):
                steps += self._loop(most, is_long, budget_s / 2)
        cores = (_cpu_seconds() - before) / (time.perf_counter() - began)
        self._drain()
        return RankSteps(tuple(steps), cores)

    def _loop(self, most: int, is_long: bool, budget_s: float) -> list[RankStep]:
        engine, noted = self.engine, self._watch.ended_steps
        noted.clear()
        until = time.perf_counter() + budget_s
        while time.perf_counter() < until or len(noted) < _LEAST_STEPS:
            while engine.num_running + engine.num_waiting < most:
                request = self._requests.next(is_long)
                self._open.add(request.request_id)
                engine.add(request)
            self._open -= {d.request_id for d in engine.step() if d.finish_reason is not None}
        pairs = list(zip(noted, noted[1:], strict=False))[_WARM_STEPS:]
        return [
            RankStep(
                loads=step.loads,
                seconds=end_s - before_s,
                attention_s=step.attention_s,
                num_micro_batches=step.num_micro_batches,
            )
            for (before_s, _), (end_s, step) in pairs
        ]

    def _drain(self) -> None:
        for request_id in self._open:
            self.engine.abort(request_id)
        self._open.clear()
        while self.engine.has_work:
            self.engine.step()


@contextmanager
def started_layout(
    folder: Path, shape: CellShape, device: str, num_threads: int | None
) -> Iterator[StartedLayout]:
    """Starts the ranks of a layout, and ends them afterwards. Raises ConfigError, CheckpointError
    and ClusterError as a server does."""
    config = config_of_cell(_config(folder, device, num_threads), 0, shape)
    watches: list[_NotingWatch] = []

    def watch_for(config: EngineConfig, model: ClusterModel) -> PoolWatch:
        ranks = Ranks(
            num_attention=shape.attention_ranks,
            num_experts=shape.expert_ranks,
            is_router_on_experts=model.is_routing_on_experts,
        )
        costs = OnlineCosts(len(sparse_layers(model.spec)))
        watches.append(_NotingWatch(MicroBatchChooser(costs, ranks)))
        return watches[0]

    built = build_cluster(config, watch_for=watch_for)
    try:
        requests = RandomRequests(built.spec.vocab_size, built.layout.max_model_len)
        yield StartedLayout(built.engine, watches[0], requests)
    finally:
        built.engine.close()


def _config(folder: Path, device: str, num_threads: int | None) -> EngineConfig:
    return EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(path=str(folder), device=device, num_threads=num_threads),  # type: ignore[arg-type]
        cache=CacheConfig(prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=_MOST_SEQUENCES),
    )


@dataclass(frozen=True, slots=True)
class PairRates:
    """Tokens per second of one cell, and of two at once with twice as many requests, for several
    numbers of requests."""

    alone: tuple[float, ...]
    both: tuple[float, ...]


class StartedCells:
    """The ranks of several cells while they are measured. `engine`: see `StartedLayout`."""

    def __init__(self, engine: CellsEngine, requests: RandomRequests) -> None:
        self.engine, self._requests = engine, requests

    def pair_rates(self, budget_s: float) -> PairRates:
        """Runs the first cell alone, and then the first two, for several numbers of requests."""
        alone, both = [], []
        for most in _PAIR_BATCHES:
            self.engine.drain(1, is_draining=True)
            alone.append(_rate(self.engine, self._requests, most, budget_s))
            self.engine.drain(1, is_draining=False)
            both.append(_rate(self.engine, self._requests, 2 * most, budget_s))
        return PairRates(tuple(alone), tuple(both))


@contextmanager
def started_cells(
    folder: Path, cells: CellsConfig, device: str, num_threads: int | None
) -> Iterator[StartedCells]:
    """Starts several cells, and ends them afterwards. Raises as `started_layout` does."""
    built = build_cells(replace(_config(folder, device, num_threads), cells=cells))
    try:
        assert isinstance(built.engine, CellsEngine), "several cells have such an engine"
        requests = RandomRequests(built.spec.vocab_size, built.layout.max_model_len)
        yield StartedCells(built.engine, requests)
    finally:
        built.engine.close()


def _rate(engine: DrivenEngine, requests: RandomRequests, most: int, budget_s: float) -> float:
    """Returns the tokens per second of a closed loop, prompts included, after a first half that
    does not count. Leaves the engine without requests."""
    lengths, num_tokens = dict[str, int](), 0
    begin = time.perf_counter() + budget_s / 2
    while (now := time.perf_counter()) < begin + budget_s or num_tokens < _LEAST_TOKENS:
        while len(lengths) < most:
            request = requests.next(len(lengths) % 2 == 1)
            lengths[request.request_id] = len(request.prompt_token_ids)
            engine.add(request)
        for delta in engine.step():
            if now >= begin:
                num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                del lengths[delta.request_id]
    seconds = time.perf_counter() - begin
    for request_id in lengths:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return num_tokens / seconds


def _cpu_seconds() -> float:
    """Returns the processor time of this process and all that it has started."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has just ended
        total += times.user + times.system
    return total
