"""One engine for each attention rank, stepped together; the server sees a single engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from moe_serve.cluster.control.messages import StepDone
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.members.roster import statuses
from moe_serve.cluster.steps.lockstep_service import LockstepService
from moe_serve.cluster.steps.remote_executor import RemoteExecutor, as_outcome
from moe_serve.cluster.steps.step_in_flight import (
    BegunStep,
    RankLostError,
    RankWork,
    RequestMoves,
    StepCoordinator,
    given_up,
)
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.request.stats import EngineLoad, EngineStats, RankLoad
from moe_serve.engine.service.admission import Admission
from moe_serve.engine.service.service_state import ServiceState
from moe_serve.model.step_plan import StepPlan

_log = logging.getLogger(__name__)


MakeEngine = Callable[[RemoteExecutor, "itertools.count[int]"], Engine]
OnLost = Callable[[str, int, list[EngineSequence]], None]  # rank, number of its process, theirs


class ClusterEngine:
    """Has `Engine`'s interface. A rank's engine holds its requests, pages and prefixes. When the
    rank is lost, its requests move to other ranks with the tokens they have.

    `begin`, `wait` and `end` split a step. `wait` may run on another thread, which then owns the
    ranks: until it returns, call only methods that read.
    """

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
        ids: itertools.count[int] | None = None,
        step_numbers: Iterator[int] | None = None,
    ) -> None:
        """`service` is the state that the engines share to keep the targets of service tiers.
        `wait_for_pages` waits a moment if requests wait for a disk, and is called while no rank has
        a step. `ids` and `step_numbers` count sequences and steps, and several cells share them."""
        self._wait_for_pages = wait_for_pages
        self._coordinator, self._make, self._close = coordinator, make_engine, close
        self._watch, self._is_ahead = watch, is_ahead
        self._service = None if service is None else LockstepService(service)
        self._begun: BegunStep | None = None  # a step sent out ahead
        self._running: BegunStep | None = None  # the step that `wait` waits for
        self._outcomes: dict[str, StepDone | Exception] = {}  # of that step
        self._ids = itertools.count() if ids is None else ids
        self._step_numbers = itertools.count(1) if step_numbers is None else step_numbers
        self._is_settled = False
        self.on_lost: OnLost = lambda rank, start, theirs: self._homeless.extend(theirs)
        self._engines: dict[str, Engine] = {}
        self._executors: dict[str, RemoteExecutor] = {}
        self._past_executors: dict[str, RemoteExecutor] = {}  # of ranks whose requests moved
        self._homeless: list[EngineSequence] = []  # without a rank, at first or after a loss
        self._moves = RequestMoves()
        self._pending: list[TokenDelta] = []  # deltas of lost ranks' engines, and of no engine
        self._past = EngineStats()  # sum over engines of lost ranks
        coordinator.settle(is_patient=True)
        while not self._follow_epoch(coordinator.settle(is_patient=False)):
            continue  # a rank was lost at once
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
        is_new = self._engines.keys() != set(self._coordinator.epoch.attention)  # a rank came back
        has_news = bool(self._homeless or self._pending) or self._coordinator.has_events
        return is_new or has_news or any(engine.has_work for engine in self._engines.values())

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
        """Registers `wake`, which any thread may call when a rank came or went."""
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

    @property
    def service(self) -> ServiceState | None:
        """The state that the engines share to keep the targets of service tiers."""
        return None if self._service is None else self._service.state

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

    @property
    def rank_engines(self) -> Mapping[str, Engine]:
        """The engines of the attention ranks that are there, by name."""
        return self._engines

    def start_of(self, rank: str) -> int:
        """Returns the number of the process of an attention rank that is there."""
        return self._executors[rank].start

    @property
    def outage_s(self) -> float:
        """The seconds for which no step could be computed; 0 while one can. Safe from any
        thread."""
        return self._coordinator.outage_s

    def step(self) -> list[TokenDelta]:
        """Schedules, runs and publishes on all ranks. Does nothing while no rank can compute."""
        if self._follow_epoch(self._coordinator.settle(is_patient=False)):
            self._begin_step(can_wait=True)
            self.wait()
        return self.end()

    def begin(self) -> bool:
        """Sends out a step, without waiting. Returns False if there is nothing to wait for."""
        if self._follow_epoch(self._coordinator.look()):
            self._begin_step(can_wait=False)
        return self._running is not None or not self._is_settled

    def wait(self) -> None:
        """Waits for the end of the step that `begin` sent out, or a moment for lost ranks."""
        if self._running is not None:
            self._outcomes = self._coordinator.collect(self._running.flight)
        elif not self._is_settled:
            self._coordinator.settle(is_patient=False)

    def end(self) -> list[TokenDelta]:
        """Publishes the step that `wait` waited for, and results that needed no step."""
        if self._is_settled:
            self._end_step()
        deltas, self._pending = self._pending, []
        return deltas

    def _begin_step(self, *, can_wait: bool) -> None:
        self._running, self._begun = self._begun or self._launch(can_wait=can_wait), None
        if self._running is not None:
            self._begun = self._launch_after(self._running)

    def _end_step(self) -> None:
        begun, self._running = self._running, None
        outcomes, self._outcomes = self._outcomes, {}
        for name, engine in list(self._engines.items()):
            is_in = begun is not None and begun.engines.get(name) is engine
            outcome = outcomes.get(name) if is_in else None
            if isinstance(outcome, Exception) and self._begun is not None:
                self._begun.flight.void(name)  # because its previous step failed
                self._executors[name].resend_tables()
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
        homeless = list(self._homeless)  # on any thread
        by_rank = {name: engine.stats() for name, engine in self._engines.items()}
        total, pools = sum((*by_rank.values(), self._past), EngineStats()), self._watch.stats()
        membership = self._coordinator.membership
        return replace(
            total,
            load=total.load + EngineLoad.of_waiting([s.request.arrival_time for s in homeless]),
            members=statuses(membership.roster, pools),
            num_lost_ranks=membership.num_lost,
            last_loss=membership.last_loss,
            pools=pools,
            expert_memory=self._watch.expert_memory,
            outage_s=self.outage_s,
            service=None if self._service is None else self._service.state.policy.stats(),
            ranks=tuple(RankLoad(name=n, load=stats.load) for n, stats in by_rank.items()),
        )

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`."""
        for engine in self._engines.values():
            engine.check_integrity()

    def _begin(self, name: str, number: int) -> StepPlan | None:
        try:
            return self._engines[name].begin_step(1, number)
        except RankLostError:
            self._evacuate(name)
            return None

    def _launch(self, *, can_wait: bool) -> BegunStep | None:
        """Plans all ranks' steps with the same number of micro-batches and sends them out
        together."""
        number = next(self._step_numbers)
        if self._service is not None:
            self._service.move_waiting(self._engines.values())
            self._service.share_budget(self._engines.values())
        plans = {name: plan for name in list(self._engines) if (plan := self._begin(name, number))}
        if not plans:
            if can_wait:
                self._wait_for_pages()
            return None
        works = self._works(plans, lambda engine, count: engine.make_plan(count, number))
        engines = {name: self._engines[name] for name in works}
        flight = self._coordinator.launch(works, can_wait=can_wait)
        return BegunStep(flight, engines, self._now)

    def _launch_after(self, begun: BegunStep) -> BegunStep | None:
        """Sends out the next step before this one has ended, if every engine can plan it
        already."""
        if not self._can_follow(begun):
            return None
        if not all(engine.begin_ahead() for engine in begun.engines.values()):
            for engine in begun.engines.values():
                engine.drop_ahead()
            return None
        number = next(self._step_numbers)
        plans = {name: engine.make_plan_ahead(1, number) for name, engine in begun.engines.items()}
        works = self._works(plans, lambda engine, count: engine.make_plan_ahead(count, number))
        flight = self._coordinator.launch_after(begun.flight, works)
        return BegunStep(flight, begun.engines, self._now)

    def _works(
        self, plans: Mapping[str, StepPlan], make_plan: Callable[[Engine, int], StepPlan]
    ) -> dict[str, RankWork]:
        """Plans a step again, with the number of micro-batches that the watch chooses for all
        engines."""
        count = self._watch.choose(plans, len(self._coordinator.epoch.experts))
        engines = {name: self._engines[name] for name in plans}
        return {
            name: self._executors[name].prepare(make_plan(engine, count), engine.step_sequences)
            for name, engine in engines.items()
        }

    def _can_follow(self, begun: BegunStep) -> bool:
        """Returns True if all engines with work are in the step, and none of its ranks is lost."""
        busy = {n: e for n, e in self._engines.items() if e.num_running or e.num_waiting}
        return (
            self._is_ahead and busy == begun.engines and self._coordinator.can_follow(begun.flight)
        )

    def _follow_epoch(self, is_settled: bool) -> bool:
        """Keeps one engine for each attention rank of the epoch. Returns `is_settled`: whether a
        step can be computed."""
        self._is_settled = is_settled
        for name, executor in list(self._executors.items()):
            if not executor.is_there:  # even if it is back already, because its pages are new
                self._evacuate(name)
        if not is_settled:
            return False
        self._watch.keep_experts(self._coordinator.epoch.experts)
        for name in self._coordinator.epoch.attention:
            if name not in self._engines:
                before = self._past_executors.pop(name, None)
                executor = RemoteExecutor(self._coordinator, name, before)
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
        self._past_executors[name] = self._executors.pop(name)
        self._watch.forget(name)
        self._pending += engine.take_pending()
        stats, computed = engine.stats(), set(engine.step_sequences)
        sequences = engine.surrender()
        self._past += stats.lost()
        _log.warning("%d requests move: %s", len(sequences), self._coordinator.membership.last_loss)
        ended = [s for s in sequences if s.id in computed and not self._moves.is_allowed(s)]
        for sequence in ended:
            self._pending.append(given_up(sequence))
            self._forget(sequence)
        start = self._past_executors[name].start
        self.on_lost(name, start, [s for s in sequences if s not in ended])

    def _forget(self, sequence: EngineSequence) -> None:
        if self._service is not None:
            self._service.state.policy.leave(sequence)

    def _home_of(self, sequence: EngineSequence) -> Engine:
        if self._service is not None:
            return self._service.choose(self._engines, sequence)
        return min(self._engines.values(), key=lambda e: e.num_pending_tokens)
