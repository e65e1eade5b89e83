"""One engine for each attention rank, stepped together; the server sees a single engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_serve.cluster.control.messages import StepDone
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.members.roster import statuses
from moe_serve.cluster.steps.lockstep_service import LockstepService
from moe_serve.cluster.steps.remote_executor import RemoteExecutor, as_outcome
from moe_serve.cluster.steps.step_in_flight import (
    MAX_MOVES,
    RankLostError,
    RequestMoves,
    StepCoordinator,
    StepInFlight,
)
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.request.stats import EngineLoad, EngineStats, RankLoad
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.model.step_plan import StepPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step under way, and the engines in it: by its end a rank may have another engine."""

    flight: StepInFlight
    engines: dict[str, Engine]
    at: float = 0.0  # when it was sent out, with service tiers


MakeEngine = Callable[[RemoteExecutor, "itertools.count[int]"], Engine]


class ClusterEngine:
    """Has `Engine`'s interface. A rank's engine holds its requests, pages and prefixes. When the
    rank is lost, its requests move to other ranks with the tokens they have."""

    def __init__(
        self,
        coordinator: StepCoordinator,
        make_engine: MakeEngine,
        watch: PoolWatch,
        close: Callable[[], None],
        *,
        is_ahead: bool,
        service: ServiceState | None = None,
        wait_for_pages: Callable[[], None] = lambda: None,
    ) -> None:
        """`service`: what the engines share to keep the targets of service tiers.
        `wait_for_pages`: waits a moment if requests wait for a disk; called while no rank has a
        step."""
        self._wait_for_pages = wait_for_pages
        self._coordinator, self._make, self._close = coordinator, make_engine, close
        self._watch, self._is_ahead = watch, is_ahead
        self._service = None if service is None else LockstepService(service)
        self._begun: _Begun | None = None  # a step sent out ahead
        self._ids, self._num_launches = itertools.count(), 0
        self._engines: dict[str, Engine] = {}
        self._executors: dict[str, RemoteExecutor] = {}
        self._homeless: list[EngineSequence] = []  # without a rank, at first or after a loss
        self._moves = RequestMoves()
        self._pending: list[TokenDelta] = []  # deltas of lost ranks' engines, and of no engine
        self._past = EngineStats()  # sum over engines of lost ranks
        coordinator.settle(is_patient=True)
        while not self._settle():  # a rank was lost at once
            continue
        self.max_model_len = next(iter(self._engines.values())).max_model_len

    def stop_waiting(self) -> None:
        """See `DrivenEngine.stop_waiting`."""
        self._coordinator.stop()

    def close(self) -> None:
        """Ends all ranks, after they have handed over the pages that a tier keeps."""
        for engine in self._engines.values():
            with contextlib.suppress(RankLostError):
                engine.close()
        self._close()

    @property
    def has_work(self) -> bool:
        has_requests = any(engine.has_work for engine in self._engines.values())
        is_untold = bool(self._homeless or self._pending)
        return has_requests or is_untold or self._coordinator.has_events

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
        """Registers `wake`, called (on any thread) when a rank came or went, perhaps while idle."""
        self._coordinator.membership.on_event = wake

    def add(self, request: GenerationRequest) -> None:
        """Queues a request. The next step gives it to the rank with the least work, so that adding
        many requests does not wait for the ranks each time."""
        length = len(request.prompt_token_ids)
        assert 0 < length < self.max_model_len, f"prompt of {length} tokens reached the engine"
        self._homeless.append(EngineSequence(next(self._ids), request))

    @property
    def admission(self) -> Admission | None:
        """See `DrivenEngine.admission`."""
        return None if self._service is None else self._service.state.admission

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        for name, engine in list(self._engines.items()):
            try:
                engine.abort(request_id)
            except RankLostError:
                self._evacuate(name)
        for sequence in [s for s in self._homeless if s.request.request_id == request_id]:
            self._forget(sequence)
            self._homeless = [s for s in self._homeless if s.request.request_id != request_id]
            aborted = TokenDelta(request_id=request_id, finish_reason=FinishReason.ABORT)
            self._pending.append(aborted)

    def step(self) -> list[TokenDelta]:
        """Schedules, runs and publishes on all ranks. Does nothing while no rank can compute."""
        if self._settle():
            self._step()
        deltas, self._pending = self._pending, []
        return deltas

    def _step(self) -> None:
        begun, self._begun = self._begun or self._launch(), None
        outcomes: dict[str, StepDone | Exception] = {}
        if begun is not None:
            self._begun = self._launch_after(begun)
            outcomes = self._coordinator.collect(begun.flight)
        for name, engine in list(self._engines.items()):
            is_in = begun is not None and begun.engines.get(name) is engine
            outcome = outcomes.get(name) if is_in else None
            if isinstance(outcome, Exception) and self._begun is not None:
                self._void(name, self._begun)
            if isinstance(outcome, RankLostError):
                self._evacuate(name)
                continue
            try:
                done = as_outcome(outcome) if isinstance(outcome, StepDone) else outcome
                self._pending += engine.end_step(done)
            except RankLostError:
                self._evacuate(name)

        if self._service is not None and begun is not None:
            self._service.step_ended(begun.at, has_work=bool(self.num_running or self.num_waiting))

    @property
    def _now(self) -> float:
        return 0.0 if self._service is None else self._service.state.clock()

    def stats(self) -> EngineStats:
        """Returns the sums over all ranks."""
        by_rank = {name: engine.stats() for name, engine in self._engines.items()}
        total, pools = sum((*by_rank.values(), self._past), EngineStats()), self._watch.stats()
        membership = self._coordinator.membership
        return replace(
            total,
            load=total.load + _load_of(self._homeless),
            members=statuses(membership.roster, pools),
            num_lost_ranks=membership.num_lost,
            last_loss=membership.last_loss,
            pools=pools,
            expert_memory=self._watch.expert_memory,
            outage_s=self._coordinator.outage_s,
            service=None if self._service is None else self._service.state.stats(),
            ranks=tuple(RankLoad(name=n, load=stats.load) for n, stats in by_rank.items()),
        )

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        for engine in self._engines.values():
            engine.check_integrity()

    def _begin(self, name: str) -> StepPlan | None:
        try:
            return self._engines[name].begin_step(1, self._num_launches)
        except RankLostError:
            self._evacuate(name)
            return None

    def _launch(self) -> _Begun | None:
        """Plans all ranks' steps with the same number of micro-batches and sends them out
        together."""
        self._num_launches += 1
        if self._service is not None:
            self._service.move_waiting(self._engines.values())
            self._service.share_budget(self._engines.values())
        plans = {name: plan for name in list(self._engines) if (plan := self._begin(name))}
        if not plans:
            self._wait_for_pages()
            return None
        count = self._watch.choose(plans, len(self._coordinator.epoch.experts))
        works = {}
        for name in plans:
            engine = self._engines[name]
            plan = engine.make_plan(count, self._num_launches)
            works[name] = self._executors[name].prepare(plan, engine.step_sequences)
        engines = {name: self._engines[name] for name in works}
        return _Begun(self._coordinator.launch(works), engines, self._now)

    def _launch_after(self, begun: _Begun) -> _Begun | None:
        """Sends out the next step before this one has ended, if every engine can plan it
        already."""
        if not self._can_follow(begun):
            return None
        if not all(engine.begin_ahead() for engine in begun.engines.values()):
            for engine in begun.engines.values():
                engine.drop_ahead()
            return None
        self._num_launches += 1
        number = self._num_launches
        plans = {name: engine.make_plan_ahead(1, number) for name, engine in begun.engines.items()}
        count = self._watch.choose(plans, len(self._coordinator.epoch.experts))
        works = {}
        for name, engine in begun.engines.items():
            plan = engine.make_plan_ahead(count, number)
            works[name] = self._executors[name].prepare(plan, engine.step_sequences)
        flight = self._coordinator.launch_after(begun.flight, works)
        return _Begun(flight, begun.engines, self._now)

    def _can_follow(self, begun: _Begun) -> bool:
        """Returns True if all engines with work are in the step, and none of its ranks is lost."""
        busy = {n: e for n, e in self._engines.items() if e.num_running or e.num_waiting}
        return (
            self._is_ahead and busy == begun.engines and self._coordinator.can_follow(begun.flight)
        )

    def _void(self, name: str, ahead: _Begun) -> None:
        """Excludes a rank from the step sent ahead, as its step before failed."""
        ahead.flight.void(name)
        self._executors[name].resend_tables()

    def _settle(self) -> bool:
        """Keeps one engine for each attention rank of the epoch; returns True if they can step."""
        is_settled = self._coordinator.settle(is_patient=False)
        for name, executor in list(self._executors.items()):
            if not executor.is_there:  # also if it is back already, as its pages are new
                self._evacuate(name)
        if not is_settled:
            return False
        self._watch.keep_experts(self._coordinator.epoch.experts)
        for name in self._coordinator.epoch.attention:
            if name not in self._engines:
                executor = RemoteExecutor(self._coordinator, name)
                self._executors[name] = executor
                self._engines = {**self._engines, name: self._make(executor, self._ids)}
        homeless, self._homeless = self._homeless, []
        for sequence in homeless:
            self._home_of(sequence).adopt(sequence)
        return True

    def _evacuate(self, name: str) -> None:
        """Moves the requests of a lost rank elsewhere, with the tokens that they have."""
        engine = self._engines[name]  # replaced, never changed: other threads read it
        self._engines = {n: other for n, other in self._engines.items() if n != name}
        del self._executors[name]
        self._watch.forget(name)
        self._pending += engine.take_pending()
        stats, computed = engine.stats(), set(engine.step_sequences)
        sequences = engine.surrender()
        self._past += stats.lost()
        _log.warning("%s is lost: %d requests move", name, len(sequences))
        for sequence in sequences:
            if sequence.id in computed and not self._moves.is_allowed(sequence):
                self._pending.append(_given_up(sequence))
                self._forget(sequence)
            else:
                self._homeless.append(sequence)

    def _forget(self, sequence: EngineSequence) -> None:
        if self._service is not None:
            self._service.state.leave(sequence)

    def _home_of(self, sequence: EngineSequence) -> Engine:
        if self._service is not None:
            return self._service.choose(self._engines, sequence)
        return min(self._engines.values(), key=lambda e: e.num_pending_tokens)


def _given_up(sequence: EngineSequence) -> TokenDelta:
    return TokenDelta(
        request_id=sequence.request.request_id,
        finish_reason=FinishReason.ERROR,
        num_preemptions=sequence.num_preemptions,
        error=f"{MAX_MOVES + 1} attention ranks were lost while they computed its next token",
    )


def _load_of(homeless: list[EngineSequence]) -> EngineLoad:
    arrivals = [sequence.request.arrival_time for sequence in homeless]
    return EngineLoad(num_waiting=len(homeless), oldest_arrival=min(arrivals, default=None))
