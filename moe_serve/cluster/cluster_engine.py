"""One engine for each attention rank, stepped together: what the server sees is one engine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_serve.cluster.coordinator import Coordinator, RankLostError
from moe_serve.cluster.messages import StepDone
from moe_serve.cluster.pool_watch import PoolWatch
from moe_serve.cluster.remote_executor import RemoteExecutor, as_outcome
from moe_serve.engine.client import EngineStats
from moe_serve.engine.engine import Engine
from moe_serve.engine.request import GenerationRequest, TokenDelta
from moe_serve.engine.sequence import Sequence as EngineSequence
from moe_serve.model.step_plan import StepPlan

_log = logging.getLogger(__name__)

MakeEngine = Callable[[RemoteExecutor, "itertools.count[int]"], Engine]


class ClusterEngine:
    """Has `Engine`'s interface. A rank's engine holds its requests, pages and prefixes; when the
    rank is lost, they go to the others with the tokens they have."""

    def __init__(
        self,
        coordinator: Coordinator,
        make_engine: MakeEngine,
        watch: PoolWatch,
        close: Callable[[], None],
    ) -> None:
        self._coordinator, self._make, self._close = coordinator, make_engine, close
        self._watch = watch
        self._ids = itertools.count()
        self._engines: dict[str, Engine] = {}
        self._executors: dict[str, RemoteExecutor] = {}
        self._homeless: list[EngineSequence] = []  # no attention rank is there
        self._past: list[EngineStats] = []  # of engines whose ranks were lost
        self._settle()

    def close(self) -> None:
        """End all ranks."""
        self._close()

    @property
    def max_model_len(self) -> int:
        return next(iter(self._engines.values())).max_model_len

    @property
    def has_work(self) -> bool:
        has_requests = any(engine.has_work for engine in self._engines.values())
        return has_requests or bool(self._homeless) or self._coordinator.has_events

    @property
    def num_waiting(self) -> int:
        return sum(e.num_waiting for e in self._engines.values()) + len(self._homeless)

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self._engines.values())

    @property
    def num_seats(self) -> int:
        return sum(engine.num_seats for engine in self._engines.values())

    def set_waker(self, wake: Callable[[], None]) -> None:
        """Called (on any thread) when a rank came or went while there may be no work."""
        self._coordinator.membership.on_event = wake

    def add(self, request: GenerationRequest) -> None:
        """Queue a request with the rank that has least to do."""
        self._settle()
        self._lightest().add(request)

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        for engine in self._engines.values():
            engine.abort(request_id)
        self._homeless = [s for s in self._homeless if s.request.request_id != request_id]

    def step(self) -> list[TokenDelta]:
        """All ranks schedule, run, publish."""
        self._settle()
        plans = {name: plan for name in list(self._engines) if (plan := self._begin(name))}
        outcomes = self._run(plans) if plans else {}
        deltas = []
        for name, engine in list(self._engines.items()):
            outcome = outcomes.get(name)
            if isinstance(outcome, RankLostError):
                self._evacuate(name)
                continue
            try:
                done = as_outcome(outcome) if isinstance(outcome, StepDone) else outcome
                deltas += engine.end_step(done)
            except RankLostError:
                self._evacuate(name)
        return deltas

    def stats(self) -> EngineStats:
        """The sums over all ranks."""
        each = [engine.stats() for engine in self._engines.values()]
        total = _sum_of(each, self._past, len(self._homeless))
        return replace(total, pools=self._watch.stats())

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        for engine in self._engines.values():
            engine.check_integrity()

    def _begin(self, name: str) -> StepPlan | None:
        try:
            return self._engines[name].begin_step(1)
        except RankLostError:
            self._evacuate(name)
            return None

    def _run(self, plans: dict[str, StepPlan]) -> dict[str, StepDone | Exception]:
        """Cut all ranks' steps alike, and run them together."""
        count = self._watch.choose(plans, len(self._coordinator.epoch.experts))
        works = {}
        for name in plans:
            engine = self._engines[name]
            plan = engine.cut(count)
            works[name] = self._executors[name].prepare(plan, engine.step_sequences)
        return self._coordinator.run(works)

    def _settle(self) -> None:
        """One engine for each rank of the epoch."""
        self._coordinator.settle()
        names = self._coordinator.epoch.attention
        for name in [n for n in self._engines if n not in names]:
            self._evacuate(name)
        for name in names:
            if name not in self._engines:
                executor = RemoteExecutor(self._coordinator, name)
                self._executors[name] = executor
                self._engines[name] = self._make(executor, self._ids)
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            self._lightest().adopt(sequence)

    def _evacuate(self, name: str) -> None:
        """Requests of a lost rank start again elsewhere, with the tokens that they have."""
        engine = self._engines.pop(name)
        del self._executors[name]
        self._watch.forget(name)
        stats, sequences = engine.stats(), engine.surrender()
        self._past.append(stats)
        _log.warning("%s is lost: %d requests move", name, len(sequences))
        self._homeless += sequences

    def _lightest(self) -> Engine:
        return min(self._engines.values(), key=lambda e: e.num_pending_tokens)


def _sum_of(
    each: Sequence[EngineStats], past: Sequence[EngineStats], num_homeless: int
) -> EngineStats:
    def total(name: str, group: Sequence[EngineStats]) -> int:
        return sum(getattr(stats, name) for stats in group)

    everyone = (*each, *past)
    return EngineStats(
        num_steps=max((stats.num_steps for stats in everyone), default=0),
        num_running=total("num_running", each),
        num_waiting=total("num_waiting", each) + num_homeless,
        num_pages=total("num_pages", each),
        num_free_pages=total("num_free_pages", each),
        num_cached_pages=total("num_cached_pages", each),
        num_preemptions=total("num_preemptions", everyone),
        num_prompt_tokens=total("num_prompt_tokens", everyone),
        num_generated_tokens=total("num_generated_tokens", everyone),
        num_evicted_pages=total("num_evicted_pages", everyone),
        num_queried_tokens=total("num_queried_tokens", everyone),
        num_hit_tokens=total("num_hit_tokens", everyone),
        is_alive=True,
    )
