"""Epochs and steps: who is in, who computes what, and what is repeated when somebody is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experts.placement.plan import Placement
from moe_serve.cluster.expert_cover import beyond, covered, renumbered
from moe_serve.cluster.membership import Membership
from moe_serve.cluster.messages import (
    DropExperts,
    FinitePages,
    Join,
    Joined,
    OpenSequence,
    Order,
    PageWork,
    QueryPages,
    RunStep,
    ServeStep,
    Slice,
    StepDone,
    StepFailed,
    StepServed,
    TakeExperts,
    TookExperts,
)
from moe_serve.cluster.pool_watch import PoolWatch
from moe_serve.cluster.rank_link import Event
from moe_serve.cluster.roster import Phase, RankState
from moe_serve.errors import ChannelClosedError, ClusterError, MoeServeError

_log = logging.getLogger(__name__)

_MAX_REPEATS = 3  # of a step whose epochs break although no rank is lost


class RankLostError(MoeServeError):
    """An attention rank is away: what it computed is gone."""


class StepFailedError(MoeServeError):
    """A rank could not compute its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one attention rank does in a step."""

    micro_batches: tuple[tuple[Slice, ...], ...] = ()
    opened: tuple[OpenSequence, ...] = ()
    closed: tuple[int, ...] = ()
    page_work: tuple[PageWork, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sum(piece.count for piece in batch) for batch in self.micro_batches)

    @property
    def again(self) -> RankWork:
        """The same step for a rank that has done what comes before it."""
        return replace(self, opened=(), closed=(), page_work=())


@dataclass(frozen=True, slots=True)
class Epoch:
    """The ranks that exchange data with each other, in their order."""

    number: int = 0
    attention: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()


@dataclass(slots=True)
class Flight:
    """A step under way."""

    step: int
    waiting: set[str]
    results: dict[str, StepDone | Exception] = field(default_factory=dict)
    broken: str | None = None  # why it must be repeated

    @property
    def is_sound(self) -> bool:
        """Whether all who were in it came to its end."""
        return self.broken is None and all(isinstance(r, StepDone) for r in self.results.values())


class Coordinator:
    """Used by the engine thread only."""

    def __init__(
        self,
        membership: Membership,
        placement: Placement,
        watch: PoolWatch,
        *,
        store_host: str,
        store_port: int,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.membership, self._placement = membership, placement
        self._store_host, self._store_port = store_host, store_port
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._epoch, self._step = Epoch(), 0
        self._is_broken = True  # no epoch, or one that somebody left
        self.num_repeats = 0
        self._watch = watch

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def has_events(self) -> bool:
        """Whether somebody came or went: `settle` has something to do."""
        return not self.membership.inbox.empty() or self._is_stale

    @property
    def _is_stale(self) -> bool:
        roster = self.membership.roster
        return self._is_broken or any(s.phase is Phase.READY for s in roster.all())

    def settle(self) -> None:
        """Take note of who came and went; make a new epoch if that calls for one.

        Waits while there is no attention or no expert rank at all; raises ClusterError if none
        comes back in time."""
        while self._next(0.0) is not None:
            continue
        deadline = time.monotonic() + self._start_timeout_s
        while self._is_stale:
            self._wait_for_both_pools(deadline)
            self._renew()

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        """One step on some attention ranks -> each one's tokens, or why there are none.

        Repeats the step for those whose peers were lost. RankLostError: the attention rank itself.
        """
        results: dict[str, StepDone | Exception] = {}
        left, num_tries = dict(works), 0
        while left:
            self.settle()
            for name in [n for n in left if n not in self._epoch.attention]:
                results[name] = RankLostError(f"{name} is away")
                del left[name]
            start = time.perf_counter()
            flight = self._fly(left)
            self._watch.ended(flight.step, time.perf_counter() - start, flight.is_sound)
            results |= flight.results
            left = {n: work.again for n, work in left.items() if n not in results}
            if flight.broken is not None:
                self._is_broken = True
                num_tries += 1
                self.num_repeats += 1
                _log.warning("step %d is repeated: %s", flight.step, flight.broken)
            if left and num_tries > _MAX_REPEATS:
                why = StepFailedError(f"repeated {num_tries} times: {flight.broken}")
                results |= dict.fromkeys(left, why)
                break
        return results

    def query_pages(self, name: str, order: QueryPages) -> list[bool]:
        """Which pages of a rank are finite; raises RankLostError."""
        answer = self._ask([name], {name: order}, FinitePages)
        if name not in answer:
            raise RankLostError(f"{name} is away")
        return list(answer[name].is_finite)

    def _fly(self, works: Mapping[str, RankWork]) -> Flight:
        """Send a step out, and wait for those who compute it."""
        epoch = self._epoch
        self._step += 1
        flight = Flight(self._step, set(works))
        rows = [works[name].rows if name in works else () for name in epoch.attention]
        if not works:
            return flight
        self._watch.began(self._step)
        head: dict[str, Any] = {"epoch": epoch.number, "step": self._step, "rows": rows}
        for name in epoch.experts:
            self._send(name, ServeStep(**head))
        for name, work in works.items():
            self._send(
                name,
                RunStep(
                    **head,
                    micro_batches=work.micro_batches,
                    opened=work.opened,
                    closed=work.closed,
                    page_work=work.page_work,
                ),
            )
        deadline = time.monotonic() + 10 * self._timeout_s
        while flight.waiting:
            event = self._next(deadline - time.monotonic())
            if event is None:
                self._give_up_silent(flight)
            else:
                self._note(flight, event)
        return flight

    def _note(self, flight: Flight, event: Event) -> None:
        """What an event means for the step under way."""
        report = event.report
        for name in [n for n in flight.waiting if not self._is_in(n)]:
            flight.waiting.discard(name)
            flight.results[name] = RankLostError(f"{name} is away: {self.membership.last_loss}")
        if self._is_broken and flight.broken is None:
            flight.broken = self.membership.last_loss
        if not isinstance(report, StepDone | StepFailed) or report.step != flight.step:
            return
        if event.name in self._epoch.experts:
            if isinstance(report, StepFailed):
                flight.broken = flight.broken or f"{event.name}: {report.why}"
            return
        if event.name not in flight.waiting:
            return
        flight.waiting.discard(event.name)
        if isinstance(report, StepDone):
            flight.results[event.name] = report
        elif report.peer is None:
            flight.results[event.name] = StepFailedError(report.why)
        else:
            flight.broken = flight.broken or f"{event.name}: {report.why}"

    def _give_up_silent(self, flight: Flight) -> None:
        for name in sorted(flight.waiting):
            step = self.membership.roster[name].link
            self.membership.give_up(
                name, f"step {flight.step} did not end (it began {step.step if step else -1})"
            )
            flight.results[name] = RankLostError(f"{name} did not end its step")
        flight.waiting.clear()
        self._is_broken = True

    def _next(self, timeout_s: float) -> Event | None:
        event = self.membership.next_event(timeout_s)
        if event is not None:
            members = (*self._epoch.attention, *self._epoch.experts)
            if any(not self._is_in(name) for name in members):
                self._is_broken = True
            if isinstance(event.report, StepServed | StepDone) and event.link is not None:
                self._watch.heard(event.name, event.report, event.link.clock_offset_ns)
        return event

    def _is_in(self, name: str) -> bool:
        return self.membership.roster[name].phase is Phase.SERVING

    def _send(self, name: str, order: Order) -> None:
        link = self.membership.roster[name].link
        if link is not None:
            try:
                link.send(order)
            except ChannelClosedError as error:
                _log.warning("%s: %s", name, error)  # its reader tells the rest

    def _wait_for_both_pools(self, deadline: float) -> None:
        roster = self.membership.roster
        while not (roster.present("attention") and roster.present("expert")):
            if self._next(deadline - time.monotonic()) is None:
                raise ClusterError(
                    f"no attention or no expert rank came back within {self._start_timeout_s:g} s; "
                    f"the last loss: {self.membership.last_loss}."
                )

    def _renew(self) -> None:
        """One attempt at a new epoch with everybody who is there."""
        roster = self.membership.roster
        if not self._cover(roster.present("expert")):
            return  # somebody was lost meanwhile
        attention, experts = roster.present("attention"), roster.present("expert")
        if not attention or not experts:
            return
        now = covered(self._placement, {s.name.index for s in experts})
        epoch = Epoch(
            self._epoch.number + 1,
            tuple(str(s.name) for s in attention),
            tuple(str(s.name) for s in experts),
        )
        join = Join(
            epoch=epoch.number,
            attention_ranks=epoch.attention,
            expert_ranks=epoch.experts,
            store_host=self._store_host,
            store_port=self._store_port,
            ranks_of=renumbered(now, [s.name.index for s in experts]),
        )
        members = [*attention, *experts]
        for state in members:
            state.phase = Phase.SERVING
        self._epoch, self._is_broken = epoch, False
        names = [str(s.name) for s in members]
        answers = self._ask(names, dict.fromkeys(names, join), Joined)
        refused = {n: a.why for n, a in answers.items() if a.why is not None}
        if refused or len(answers) < len(names):
            _log.warning("epoch %d did not meet: %s", epoch.number, refused)
            self._is_broken = True

    def _cover(self, experts: Sequence[RankState]) -> bool:
        """Have experts without a rank loaded by those that are there; False if one failed."""
        if not experts:
            return False
        now = covered(self._placement, {s.name.index for s in experts})
        orders: dict[str, Order] = {}
        for state in experts:
            needed = beyond(self._placement, now, state.name.index)
            missing = {
                layer: sorted(set(ids) - set(state.extra.get(layer, ())))
                for layer, ids in needed.items()
            }
            missing = {layer: ids for layer, ids in missing.items() if ids}
            if missing:
                orders[str(state.name)] = TakeExperts(experts=missing)
                for layer, ids in missing.items():
                    state.extra.setdefault(layer, []).extend(ids)
            elif state.extra and now == self._placement:
                orders[str(state.name)] = DropExperts()
                state.extra = {}
        answers = self._ask(list(orders), orders, TookExperts)
        for name, answer in answers.items():
            if answer.why is not None:
                self.membership.give_up(name, f"it could not take experts over: {answer.why}")
        return all(name in answers and answers[name].why is None for name in orders)

    def _ask(self, names: Sequence[str], orders: Mapping[str, Order], kind: type) -> dict[str, Any]:
        """Send orders and collect the answers of one kind; ranks that are lost give none."""
        for name in names:
            self._send(name, orders[name])
        waiting = set(names)
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            event = self._next(deadline - time.monotonic())
            if event is None:
                for name in sorted(waiting):
                    self.membership.give_up(name, f"no {kind.__name__} in {self._timeout_s:g} s")
                self._is_broken = True
                break
            if event.name in waiting and isinstance(event.report, kind):
                answers[event.name] = event.report
                waiting.discard(event.name)
            present = {str(s.name) for s in self.membership.roster.present()}
            waiting &= present
        return answers
