"""Epochs and steps: who is in, who computes what, and what is repeated when somebody is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from moe_serve.cluster.epoch_maker import Epoch, EpochMaker
from moe_serve.cluster.flight import Flight
from moe_serve.cluster.membership import Membership
from moe_serve.cluster.messages import (
    FinitePages,
    QueryPages,
    RunStep,
    ServeStep,
    StepDone,
    StepFailed,
)
from moe_serve.cluster.pool_watch import PoolWatch
from moe_serve.cluster.rank_calls import RankCalls
from moe_serve.cluster.rank_link import Event
from moe_serve.cluster.rank_work import RankLostError, RankWork, StepFailedError
from moe_serve.cluster.roster import Phase
from moe_serve.errors import ClusterError

_log = logging.getLogger(__name__)

_MAX_REPEATS = 3  # of a step; then each sequence is computed alone, to find who breaks it
_WAIT_S = 0.1  # for ranks to come back, before it is looked whether the engine stops


class Coordinator:
    """Used by the engine thread only, but for `stop` and `outage_s`."""

    def __init__(
        self,
        membership: Membership,
        calls: RankCalls,
        maker: EpochMaker,
        watch: PoolWatch,
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.membership, self._calls, self._maker, self._watch = membership, calls, maker, watch
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._epoch, self._step = Epoch(), 0
        self._number = 0  # of the last epoch that was tried
        self._is_torn = False  # the epoch's members are all there, but do not reach each other
        self._outage_since: float | None = time.monotonic()
        self._is_stopping = threading.Event()
        self.num_repeats = 0

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def has_events(self) -> bool:
        """Whether somebody came or went: `settle` has something to do."""
        return not self.membership.inbox.empty() or self._is_stale

    @property
    def outage_s(self) -> float:
        """For how long no step could be computed; 0 while one can."""
        since = self._outage_since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        """Nobody waits any more for ranks to come back. On any thread."""
        self._is_stopping.set()

    def is_in(self, name: str, start: int) -> bool:
        """Whether this process of a rank is in the epoch."""
        state = self.membership.roster[name]
        return (
            state.phase is Phase.SERVING
            and state.num_starts == start
            and self._epoch.starts.get(name) == start
        )

    def settle(self, *, is_patient: bool) -> bool:
        """Take note of who came and went; make a new epoch if that calls for one.

        -> whether a step can be computed. If there is no attention or no expert rank at all, it
        waits a moment, or when `is_patient` until some are back. Raises ClusterError when that
        takes longer than a start may."""
        while self._calls.next_event(0.0) is not None:
            continue
        has_waited = False
        while self._is_stale:
            if self._is_stopping.is_set():
                return False
            self._note_outage()
            if self._maker.can_make:
                self._renew()
            elif has_waited and not is_patient:
                return False
            else:
                self._calls.next_event(_WAIT_S)
                has_waited = True
        self._outage_since = None
        return True

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        """One step on some attention ranks -> each one's tokens, or why there are none.

        Repeats the step for those whose peers were lost. RankLostError: the attention rank itself.
        """
        results: dict[str, StepDone | Exception] = {}
        left, num_tries = dict(works), 0
        while left:
            is_settled = self.settle(is_patient=True)
            for name, work in list(left.items()):
                if not is_settled or not self.is_in(name, work.start):
                    results[name] = RankLostError(f"{name} is away")
                    del left[name]
            if not left:
                break
            start = time.perf_counter()
            flight = self._fly(left)
            self._watch.ended(flight.step, time.perf_counter() - start, flight.is_sound)
            results |= flight.results
            left = {n: work.again for n, work in left.items() if n not in results}
            if flight.is_broken:
                self._is_torn = True
                num_tries += 1
                self.num_repeats += 1
                what = "is repeated" if left else "ended, and its epoch with it"
                _log.warning("step %d %s: %s", flight.step, what, flight.why)
            if left and num_tries > _MAX_REPEATS:
                why = StepFailedError(f"repeated {num_tries} times: {flight.why}")
                results |= dict.fromkeys(left, why)
                break
        return results

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        """Which pages of a rank are finite; raises RankLostError."""
        if not self.is_in(name, start):
            raise RankLostError(f"{name} is away")
        answer = self._calls.ask({name: order}, FinitePages, self._timeout_s)
        if name in answer and len(answer[name].is_finite) != len(order.pages):
            num_told = len(answer.pop(name).is_finite)
            self.membership.give_up(name, f"asked for {len(order.pages)} pages, told of {num_told}")
        if name not in answer:
            raise RankLostError(f"{name} is away: {self.membership.last_loss}")
        return list(answer[name].is_finite)

    @property
    def _is_whole(self) -> bool:
        """Whether all members of the epoch are there, and none has left its data group."""
        starts = self._epoch.starts
        are_in = all(self.is_in(name, start) for name, start in starts.items())
        return bool(starts) and are_in and not self._is_torn

    @property
    def _is_stale(self) -> bool:
        """Whether a new epoch is called for: also somebody new does."""
        is_joining = any(s.phase is Phase.READY for s in self.membership.roster.all())
        return is_joining or not self._is_whole

    def _note_outage(self) -> None:
        """It begins when the epoch breaks; somebody who joins causes none."""
        if self._outage_since is None and not self._is_whole:
            self._outage_since = time.monotonic()
        if self.outage_s > self._start_timeout_s:
            raise ClusterError(
                f"no step could be computed for {self._start_timeout_s:g} s; the last loss: "
                f"{self.membership.last_loss}. The ranks' output says why they do not come back."
            )

    def _renew(self) -> None:
        """One attempt at a new epoch."""
        self._number += 1
        epoch = self._maker.make(self._number)
        if epoch is None:
            self._is_torn = True  # some members may have left the epoch before
            return
        self._epoch, self._is_torn = epoch, False
        _log.info("epoch %d: %s", epoch.number, ", ".join((*epoch.attention, *epoch.experts)))

    def _fly(self, works: Mapping[str, RankWork]) -> Flight:
        """Send a step out, and wait for those who compute it."""
        epoch = self._epoch
        self._step += 1
        flight = Flight(self._step, set(works))
        self._watch.began(self._step)
        rows = [works[name].rows if name in works else () for name in epoch.attention]
        head: dict[str, Any] = {"epoch": epoch.number, "step": self._step, "rows": rows}
        for name in epoch.experts:
            self._calls.send(name, ServeStep(**head))
        for name, work in works.items():
            order = RunStep(
                **head,
                micro_batches=work.micro_batches,
                opened=work.opened,
                closed=work.closed,
                page_work=work.page_work,
            )
            self._calls.send(name, order)
        deadline = time.monotonic() + 10 * self._timeout_s
        while flight.waiting:
            event = self._calls.next_event(deadline - time.monotonic())
            if event is None:
                self._give_up_silent(flight)
            else:
                self._note(flight, event)
        return flight

    def _note(self, flight: Flight, event: Event) -> None:
        """What an event means for the step under way."""
        for name in [n for n in flight.waiting if not self._is_member(n)]:
            flight.waiting.discard(name)
            flight.results[name] = RankLostError(f"{name} is away: {self.membership.last_loss}")
        if not self._is_whole:
            flight.break_up(self.membership.last_loss)
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

    def _give_up_silent(self, flight: Flight) -> None:
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
        return self.is_in(name, self._epoch.starts[name])
