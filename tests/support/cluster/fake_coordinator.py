"""Attention ranks without processes: each computes its steps on a fake model as they are sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from moe_serve.cache.events.change_record import IGNORE_PAGES, PageListener
from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.cluster.control.messages import (
    PageWork,
    QueryPages,
    RunStep,
    StageSeconds,
    StepDone,
)
from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.members.roster import RankPhase, Roster
from moe_serve.cluster.ranks.mirror import Mirrors, tokens_of
from moe_serve.cluster.steps.cluster_engine import ClusterEngine
from moe_serve.cluster.steps.epoch_maker import Epoch
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.cluster.steps.step_in_flight import RankLostError, RankWork, StepInFlight
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.service.service_state import ServiceState
from tests.support.engine.fake_runner import FakeRunner


class FakeRank:
    """One process of an attention rank."""

    def __init__(self) -> None:
        self.runner, self._mirrors = FakeRunner(), Mirrors()
        self._executor = LocalExecutor(self.runner, Sampler(frozenset()))

    def run(self, order: RunStep) -> StepDone:
        plan = self._mirrors.update(order)
        self.do_page_work(order.page_work)
        outcome = self._executor.run(plan, self._mirrors.sequences)
        self._mirrors.append(tokens_of(outcome))
        return StepDone(
            epoch=order.epoch,
            step=order.step,
            sampled=outcome.sampled,
            failures=outcome.failures,
            prompt_logprobs=outcome.prompt_logprobs,
            seconds=StageSeconds(),
        )

    def do_page_work(self, page_work: object) -> None:
        assert isinstance(page_work, tuple)
        for work in page_work:
            assert isinstance(work, PageWork)
            self.runner.clear_pages(list(work.clear))
            self.runner.copy_pages([(source, target) for source, target in work.copy])


class FakeMembers:
    """Implements Members."""

    def __init__(self, roster: Roster) -> None:
        self.on_event: Callable[[], None] = lambda: None
        self.roster, self.num_lost, self.last_loss = roster, 0, ""


class FakeCoordinator:
    """Implements StepCoordinator. A test loses ranks by `lose`, before or in a step."""

    def __init__(self, num_attention: int) -> None:
        roster = Roster(all_ranks(num_attention, 1))
        self.membership, self.outage_s = FakeMembers(roster), 0.0
        self.names = tuple(f"attention-{index}" for index in range(num_attention))
        self.ranks = {name: FakeRank() for name in self.names}
        self.starts = dict.fromkeys(self.names, 1)
        self.away: set[str] = set()
        self.has_events, self.is_stopped = False, False
        self.epoch = Epoch(1, self.names, ("expert-0",), dict(self.starts))
        self.dies_in_step: str | None = None  # a rank whose every step kills it
        self.num_ahead = 0
        self._numbers = itertools.count(1)
        for state in roster.all():
            state.phase, state.num_starts = RankPhase.SERVING, 1

    def lose(self, name: str, *, is_back: bool = True) -> None:
        """Ends a rank's process. If `is_back`, a new one is there at the next `settle`."""
        self.membership.num_lost += 1
        self.membership.last_loss = f"{name}: the test took it"
        self.ranks[name], self.starts[name] = FakeRank(), self.starts[name] + 1
        self.has_events = True
        if not is_back:
            self.away.add(name)

    def stop(self) -> None:
        self.is_stopped = True

    def is_in(self, name: str, start: int) -> bool:
        return name not in self.away and self.starts[name] == start == self.epoch.starts.get(name)

    def settle(self, *, is_patient: bool) -> bool:
        there = tuple(name for name in self.names if name not in self.away)
        starts = {name: self.starts[name] for name in there}
        if starts != self.epoch.starts and there:
            self.epoch = Epoch(self.epoch.number + 1, there, ("expert-0",), starts)
        self.has_events = False
        return bool(there)

    def look(self) -> bool:
        """Returns False if a rank came or went since the last `settle`."""
        there = {n: start for n, start in self.starts.items() if n not in self.away}
        if not there or there != self.epoch.starts:
            return False
        self.has_events = False
        return True

    def launch(self, works: Mapping[str, RankWork], *, can_wait: bool = True) -> StepInFlight:
        step = next(self._numbers)
        flight = StepInFlight(step, self.epoch.number, dict(works), 0.0, set())
        for name, work in works.items():
            flight.results[name] = self._computed(name, work, step)
        return flight

    def can_follow(self, flight: StepInFlight) -> bool:
        return flight.is_sound and not self.has_events

    def launch_after(self, flight: StepInFlight, works: Mapping[str, RankWork]) -> StepInFlight:
        self.num_ahead += 1
        return self.launch({name: replace(w, after=flight.step) for name, w in works.items()})

    def collect(self, flight: StepInFlight) -> dict[str, StepDone | Exception]:
        if self.dies_in_step in flight.works:
            self.lose(str(self.dies_in_step))
        lost = {
            name: RankLostError(f"{name} is away")
            for name, work in flight.works.items()
            if not self.is_in(name, work.start)
        }
        results = {name: each for name, each in flight.results.items() if name in flight.works}
        return results | lost

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        return self.collect(self.launch(works))

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        if not self.is_in(name, start):
            raise RankLostError(f"{name} is away")
        self.ranks[name].do_page_work(order.page_work)
        return self.ranks[name].runner.finite_pages(list(order.pages))

    def _computed(self, name: str, work: RankWork, step: int) -> StepDone | Exception:
        if not self.is_in(name, work.start):
            return RankLostError(f"{name} is away")
        order = RunStep(
            epoch=self.epoch.number,
            step=step,
            rows=(work.rows,),
            micro_batches=work.micro_batches,
            opened=work.opened,
            closed=work.closed,
            page_work=work.page_work,
            after=work.after,
        )
        return self.ranks[name].run(order)


PLAIN = SchedulerConfig(max_num_seqs=4, max_batched_tokens=32)


def fake_cluster(
    coordinator: FakeCoordinator,
    *,
    is_ahead: bool = True,
    scheduler: SchedulerConfig = PLAIN,
    clock: Clock = REAL_CLOCK,
    listeners: Mapping[str, PageListener] | None = None,
    ids: itertools.count[int] | None = None,
) -> ClusterEngine:
    """Returns an engine over fake ranks, with 20 pages each, and 4 seats if not told otherwise.
    `listeners` hear of the pages of the ranks with these names."""
    service = ServiceState.of(scheduler, clock)

    def make_engine(executor: RemoteExecutor, ids: itertools.count[int]) -> Engine:
        return Engine(
            executor,
            scheduler=scheduler,
            num_pages=20,
            micro_batches=1,
            max_model_len=160,
            eos_token_ids=frozenset(),
            ids=ids,
            clock=clock,
            service=service,
            listener=(listeners or {}).get(executor.name, IGNORE_PAGES),
        )

    watch = PoolWatch(None, 2, None)
    return ClusterEngine(
        coordinator,
        make_engine,
        watch,
        lambda: None,
        is_ahead=is_ahead,
        service=service,
        ids=ids,
    )
