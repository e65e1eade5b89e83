"""Drives epochs and steps: chooses the members, sends out work, and repeats steps after a loss."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import replace

from moe_serve.cluster.control.messages import (
    FinitePages,
    QueryPages,
    StepDone,
    StepFailed,
)
from moe_serve.cluster.control.placement_messages import Staged
from moe_serve.cluster.control.rank_link import LinkEvent
from moe_serve.cluster.members.current_placement import CurrentPlacement
from moe_serve.cluster.members.membership import Membership
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.members.rank_calls import RankCalls
from moe_serve.cluster.members.roster import RankPhase
from moe_serve.cluster.rebalance.mover import Mover
from moe_serve.cluster.steps.epoch_maker import Epoch, EpochMaker
from moe_serve.cluster.steps.step_in_flight import (
    RankLostError,
    RankWork,
    StepFailedError,
    StepInFlight,
    step_orders,
)
from moe_serve.errors import ClusterError

_log = logging.getLogger(__name__)

_MAX_REPEATS = 3  # repeats of a step; then each sequence runs alone, to find the one that breaks it
_WAIT_S = 0.1  # wait for lost ranks between two checks for `stop`


class Coordinator:
    """Implements StepCoordinator for ranks that are processes. Used by the engine thread only,
    except `stop`, `outage_s` and `open_steps`."""

    def __init__(
        self,
        membership: Membership,
        calls: RankCalls,
        maker: EpochMaker,
        watch: PoolWatch,
        current: CurrentPlacement,
        mover: Mover,
        *,
        timeout_s: float,
        outage_limit_s: float,
        patience_s: float = math.inf,
    ) -> None:
        """After `outage_limit_s` seconds without a step, `settle` raises. After `patience_s` all
        attention ranks count as lost, so that other cells take their requests."""
        self.membership, self._calls, self._maker, self._watch = membership, calls, maker, watch
        self._cell = f"{membership.cell}: " if membership.cell else ""  # prefix of log lines
        self._current, self._mover, self._clock = current, mover, calls.clock
        self._timeout_s, self._outage_limit_s = timeout_s, outage_limit_s
        self._patience_s = patience_s
        self._epoch, self._step = Epoch(), 0
        self._number = 0  # number of the last epoch tried
        self._torn_by = ""  # why members cannot reach each other, although all are there
        self._outage_since: float | None = self._clock()
        self._is_stopping = threading.Event()
        self._open: list[StepInFlight] = []  # steps under way, in order
        self._last_end = 0.0  # the last end of a step
        calls.on_event = self._note
        membership.is_due = lambda: mover.has_news  # a move can time out in an idle engine too
        self.num_repeats = 0

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def has_events(self) -> bool:
        """Returns True if `settle` has something to do: a rank came or went, or a move is in
        progress."""
        return not self.membership.inbox.empty() or self._is_stale or self._mover.has_news

    @property
    def outage_s(self) -> float:
        """Returns the seconds for which no step could be computed; 0 while one can."""
        since = self._outage_since
        return 0.0 if since is None else self._clock() - since

    @property
    def open_steps(self) -> list[str]:
        """Describes the steps in progress and the ranks that they wait for."""
        return [flight.describe(self._clock()) for flight in list(self._open)]

    def stop(self) -> None:
        """Ends the wait for lost ranks, and soon that for answers. On any thread."""
        self._is_stopping.set()
        self._calls.stop()

    def is_in(self, name: str, start: int) -> bool:
        """See `StepCoordinator.is_in`."""
        return self._is_in(name, start) and not self._is_given_up

    @property
    def _is_given_up(self) -> bool:
        return self.outage_s > self._patience_s

    def _is_in(self, name: str, start: int) -> bool:
        state = self.membership.roster[name]
        return (
            state.phase is RankPhase.SERVING
            and state.num_starts == start
            and self._epoch.starts.get(name) == start
        )

    def settle(self, *, is_patient: bool) -> bool:
        """Handles joins and losses, and makes a new epoch if they call for one.

        Returns True if a step can be computed. If there is no attention or no expert rank at all,
        it waits a moment, or, if `is_patient`, until some are back. Raises ClusterError when that
        takes longer than a start may.
        """
        has_waited = False
        while not self.look():
            self._mover.call_off(f"the epoch ended: {self._why_stale}")
            for flight in list(self._open):  # a rank's answers are needed before it moves on
                self._await_end(flight)
            if self._is_stopping.is_set():
                if not self._epoch.number:  # the engine waits for its first one
                    raise ClusterError("the start was cancelled")
                return False
            self._note_outage()
            if self._maker.can_make:
                self._renew()
            elif has_waited and (not is_patient or self._is_given_up):
                return False
            else:
                self._calls.next_event(_WAIT_S)
                has_waited = True
        return True

    def look(self) -> bool:
        """See `StepCoordinator.look`."""
        while self._calls.next_event(0.0) is not None:
            continue
        if self._is_stale:
            return False
        self._outage_since = None
        self._mover.advance()
        return True

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        """Runs one step on some attention ranks: `launch` and `collect`."""
        return self.collect(self.launch(works))

    def launch(self, works: Mapping[str, RankWork], *, can_wait: bool = True) -> StepInFlight:
        """Sends a step out to the attention ranks that are there. With `can_wait` false, a step
        that would have to wait is sent by `collect`."""
        if not can_wait and self._is_stale:
            return StepInFlight(0, 0, dict(works), self._clock(), set(), is_sent=False)
        is_settled = not can_wait or self.settle(is_patient=True)
        away: dict[str, StepDone | Exception] = {
            name: RankLostError(f"{name} is away")
            for name, work in works.items()
            if not is_settled or not self.is_in(name, work.start)
        }
        flight = self._send_step({name: work for name, work in works.items() if name not in away})
        flight.results |= away
        return flight

    def can_follow(self, flight: StepInFlight) -> bool:
        """Returns True if the next step can be sent out now: this one seems to succeed."""
        is_of_now = flight.is_sent and flight.epoch == self._epoch.number
        return flight.is_sound and is_of_now and not self._is_stale

    def launch_after(self, flight: StepInFlight, works: Mapping[str, RankWork]) -> StepInFlight:
        """Sends out the ranks' next step while this one runs; check `can_follow` first."""
        return self._send_step({n: replace(work, after=flight.step) for n, work in works.items()})

    def collect(self, flight: StepInFlight) -> dict[str, StepDone | Exception]:
        """Waits for a step's end; returns each attention rank's tokens, or the error instead.

        Repeats the step for ranks whose peers were lost. The error is RankLostError if the
        attention rank itself is lost.
        """
        results: dict[str, StepDone | Exception] = {}
        num_tries = 0
        if not flight.is_sent:
            flight = self.launch(flight.works)
        while True:
            self._await_end(flight)
            results |= flight.results
            left = flight.left
            if flight.is_broken:
                if flight.epoch == self._epoch.number:
                    self._torn_by = flight.why or "a step broke"
                num_tries += 1
                self.num_repeats += 1
                what = "is repeated" if left else "ended, and its epoch with it"
                _log.warning("%sstep %d %s: %s", self._cell, flight.step, what, flight.why)
            if not left:
                return results
            if num_tries > _MAX_REPEATS:
                why = StepFailedError(
                    f"the step failed {num_tries} times, the last time because {flight.why}"
                )
                return results | dict.fromkeys(left, why)
            flight = self.launch(left)

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        """Returns which pages of a rank are finite; raises RankLostError."""
        if not self.is_in(name, start):
            raise RankLostError(f"{name} is away")
        for flight in list(self._open):
            self._await_end(flight)  # the rank answers after these steps
        answer = self._calls.ask({name: order}, FinitePages, self._timeout_s)
        if name in answer and len(answer[name].is_finite) != len(order.pages):
            num_told = len(answer.pop(name).is_finite)
            asked = len(order.pages)
            self.membership.give_up(name, f"asked for {asked} pages, it answered for {num_told}")
        if name not in answer:
            raise RankLostError(f"{name} is away: {self.membership.last_loss}")
        return list(answer[name].is_finite)

    @property
    def _is_whole(self) -> bool:
        """Returns True if all members of the epoch are there, and none has left its data group."""
        return bool(self._epoch.starts) and not self._away and not self._torn_by

    @property
    def _away(self) -> list[str]:
        """The members of the epoch that are lost."""
        return [name for name, start in self._epoch.starts.items() if not self._is_in(name, start)]

    @property
    def _is_stale(self) -> bool:
        """Returns True if a new epoch is due, after a loss or for a rank that joins."""
        is_joining = any(s.phase is RankPhase.READY for s in self.membership.roster.all())
        return is_joining or not self._is_whole

    @property
    def _why_stale(self) -> str:
        """Returns why the epoch ends. Data connections may end before the control connection."""
        if self._away:
            return f"{', '.join(self._away)} lost ({self.membership.last_loss})"
        return self._torn_by or "a rank joins"

    def _note_outage(self) -> None:
        """Starts the outage when the epoch breaks. A rank that joins causes no outage."""
        if self._outage_since is None and not self._is_whole:
            self._outage_since = self._clock()
        if self.outage_s > self._outage_limit_s:
            raise ClusterError(
                f"no step could be computed for {self._outage_limit_s:g} s; the last loss: "
                f"{self.membership.last_loss}. The ranks' output says why they do not come back."
            )

    def _renew(self) -> None:
        """Tries once to make a new epoch."""
        self._number += 1
        epoch = self._maker.make(self._number)
        if epoch is None:
            self._torn_by = "it was never complete"  # members may have left the epoch before
            return
        self._epoch, self._torn_by = epoch, ""
        _log.info("%sepoch %d: %s", self._cell, epoch.number, ", ".join(epoch.starts))

    def _send_step(self, works: Mapping[str, RankWork]) -> StepInFlight:
        """Sends a step out."""
        epoch = self._epoch
        self._step += 1
        flight = StepInFlight(self._step, epoch.number, dict(works), self._clock(), set(works))
        if not works:
            return flight
        self._open.append(flight)
        self._watch.began(self._step)
        for name, order in step_orders(flight, epoch, self._current.version.number).items():
            self._calls.send(name, order)
        return flight

    def _await_end(self, flight: StepInFlight) -> None:
        """Waits for the ranks that compute a step."""
        deadline = self._clock() + 10 * self._timeout_s
        while flight.waiting:
            if self._calls.wait_for_event(deadline) is None:
                if self._calls.is_stopped:
                    self._leave(flight)
                else:
                    self._give_up_silent(flight)
        if flight in self._open:
            self._open.remove(flight)
            now, start = self._clock(), max(flight.start, self._last_end)
            self._watch.ended(flight.step, now - start, flight.is_sound)
            if flight.is_sound:
                self._mover.times.add(now - start)
            self._last_end = now

    def _note(self, event: LinkEvent) -> None:
        """Passes an event on to the move and to the steps in progress."""
        if isinstance(event.report, Staged):
            self._mover.heard(event.name, event.report)
        for flight in self._open:
            if flight.waiting:
                self._note_in(flight, event)

    def _note_in(self, flight: StepInFlight, event: LinkEvent) -> None:
        self._drop_lost(flight)
        if not self._is_whole:
            flight.break_up(self.membership.last_loss if self._away else self._torn_by)
        report = event.report
        if not isinstance(report, StepDone | StepFailed) or report.step != flight.step:
            return
        if isinstance(report, StepFailed) and report.peer is not None:
            flight.break_up(f"{event.name}: {report.why}")
        if event.name not in flight.waiting:
            return
        flight.waiting.discard(event.name)
        if isinstance(report, StepDone):
            flight.results[event.name] = report
        elif report.peer is None:
            flight.results[event.name] = StepFailedError(report.why)

    def _drop_lost(self, flight: StepInFlight) -> None:
        for name in [n for n in flight.waiting if not self._is_member(n)]:
            flight.waiting.discard(name)
            flight.results[name] = RankLostError(f"{name} is away: {self.membership.last_loss}")

    def _leave(self, flight: StepInFlight) -> None:
        """Ends the wait for a step, because the server ends."""
        why = "the server ends"
        flight.results |= {name: RankLostError(f"{name}: {why}") for name in flight.waiting}
        flight.waiting.clear()
        flight.break_up(why)

    def _give_up_silent(self, flight: StepInFlight) -> None:
        self._drop_lost(flight)
        for name in sorted(flight.waiting):
            link = self.membership.roster[name].link
            began = "nothing is known of it" if link is None else f"it began step {link.step}"
            seconds = 10 * self._timeout_s
            why = f"step {flight.step} did not end in {seconds:g} s ({began})"
            self.membership.give_up(name, why)
            flight.results[name] = RankLostError(f"{name}: {why}")
        flight.waiting.clear()
        flight.break_up(self.membership.last_loss)

    def _is_member(self, name: str) -> bool:
        return self._is_in(name, self._epoch.starts[name])
