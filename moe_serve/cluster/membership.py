"""Which ranks there are: started, admitted, watched, given up, and started again.

The engine thread handles events; links read on threads of their own; one more thread watches for
processes that ended, for silence, and starts what is due.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from moe_serve.cluster.channel import Channel
from moe_serve.cluster.heartbeat import Heartbeats
from moe_serve.cluster.messages import (
    Configure,
    Examined,
    Hello,
    Loaded,
    Loading,
    Stop,
    Unwell,
)
from moe_serve.cluster.preflight_round import PreflightRound
from moe_serve.cluster.rank_link import Event, Gone, Inbox, RankLink
from moe_serve.cluster.rank_name import RankName
from moe_serve.cluster.rank_starter import RankStarter
from moe_serve.cluster.roster import Phase, RankState, Roster
from moe_serve.errors import ClusterError, ConfigError, MoeServeError
from moe_serve.model.model_tensors import LoadProgress

_log = logging.getLogger(__name__)

_WATCH_S = 0.05
_LAST_WORDS_S = 2.0
_PREFLIGHT_S = 120.0  # for processes to start and import torch, also from a slow file system
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0  # between two starts of a rank that keeps dying


class Membership:
    """`configure` says what a rank loads, `weights` what hash it must have then."""

    def __init__(
        self,
        roster: Roster,
        configure: Callable[[RankName], Configure],
        weights: str,
        heartbeat_s: float,
    ) -> None:
        self.roster, self._configure, self._weights = roster, configure, weights
        self.inbox: Inbox = queue.SimpleQueue()
        self._starter: RankStarter | None = None
        self._preflight: PreflightRound | None = None  # while it goes on
        self._beats: Heartbeats[str] = Heartbeats(heartbeat_s)
        self._lock = threading.Lock()  # of the beats and of what is due
        self._due: dict[str, float] = {}  # when to start a rank
        self._is_closing = threading.Event()
        self._loading: dict[str, tuple[int, int]] = {}
        self.on_event: Callable[[], None] = lambda: None  # wakes an engine that is idle
        self.num_lost = 0
        self.last_loss = ""

    def admit(self, channel: Channel[Any]) -> None:
        """A connection that proved itself. Called on any thread."""
        RankLink(channel, self.inbox, self._beat)

    def start(
        self,
        starter: RankStarter,
        preflight: PreflightRound,
        timeout_s: float,
        progress: LoadProgress | None,
    ) -> None:
        """Start all ranks and wait until they have loaded; raises what keeps one from it."""
        self._starter, self._preflight = starter, preflight
        for state in self.roster.all():
            self._start(state.name)
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        deadline = time.monotonic() + timeout_s
        self._pass_preflight(preflight, min(timeout_s, _PREFLIGHT_S))
        while waiting := [s for s in self.roster.all() if s.phase is not Phase.READY]:
            event = self.next_event(deadline - time.monotonic())
            if event is None:
                names = ", ".join(f"{s.name} ({s.phase.value})" for s in waiting)
                raise ClusterError(
                    f"after {timeout_s:g} s these ranks are not ready: {names}. Look at their "
                    "output, or raise cluster.start_timeout_s."
                )
            self._check_start(event)
            if progress is not None:
                counts = list(self._loading.values())
                progress(sum(done for done, _ in counts), sum(total for _, total in counts))

    def _pass_preflight(self, preflight: PreflightRound, timeout_s: float) -> None:
        """Nobody loads before everybody is there and fits; raises ClusterError with what does not.

        Ranks that come later, restarted, are only held to the hash of their weights.
        """
        deadline, is_asked = time.monotonic() + timeout_s, False
        while not preflight.is_done:
            if preflight.has_all_come and not is_asked:
                is_asked = True
                for state in self.roster.all():
                    state.send(preflight.order)
            event = self.next_event(deadline - time.monotonic())
            if event is None:
                break
            self._check_start(event)
            if isinstance(event.report, Examined):
                preflight.examined(event.name, event.report)
        if problems := preflight.problems(timeout_s):
            raise ClusterError("\n".join(map(str, problems)))
        self._preflight = None
        for state in self.roster.all():
            state.send(self._configure(state.name))

    def _check_start(self, event: Event) -> None:
        """What no rank may do before all have loaded."""
        if isinstance(event.report, Unwell):
            raise ConfigError(f"{event.name} cannot serve: {event.report.why}")
        if isinstance(event.report, Gone):
            raise ClusterError(f"{event.name} ended while it started: {self._cause(event)}")

    def _cause(self, event: Event) -> str:
        """Why a rank is gone; its process may tell more a moment after its connection does."""
        assert isinstance(event.report, Gone), "somebody is gone"
        end = time.monotonic() + _LAST_WORDS_S
        while (later := self.next_event(end - time.monotonic())) is not None:
            if later.name == event.name and isinstance(later.report, Gone):
                return later.report.why
        return event.report.why

    def next_event(self, timeout_s: float) -> Event | None:
        """Wait for one, and do what follows from it here; None after the time-out."""
        try:
            event = self.inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        self._handle(event)
        return event

    def give_up(self, name: str, why: str) -> None:
        """A rank is of no use any more: end its process, and start it again."""
        state = self.roster[name]
        _log.warning("%s is lost: %s", name, why)
        self.num_lost += 1
        self.last_loss = f"{name}: {why}"
        state.lose()
        with self._lock:
            self._beats.forget(name)
        if self._is_closing.is_set() or self._starter is None:
            return
        self._starter.kill(state.name)
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** max(0, state.num_starts - 2))
        with self._lock:
            self._due[name] = time.monotonic() + (0.0 if state.num_starts < 2 else pause_s)

    def close(self) -> None:
        """End all ranks."""
        self._is_closing.set()
        for state in self.roster.all():
            state.send(Stop())
        if self._starter is not None:
            self._starter.stop()
        for state in self.roster.all():
            state.lose()

    def _handle(self, event: Event) -> None:
        if event.name not in self.roster:
            if event.link is not None:
                event.link.close()
            return
        state, report = self.roster[event.name], event.report
        if isinstance(report, Hello):
            self._welcome(state, event)
        elif event.link is not state.link:
            return  # of a process that was given up
        elif isinstance(report, Loading):
            self._loading[event.name] = (report.done, report.total)
        elif isinstance(report, Loaded):
            self._take_in(state, report)
        elif isinstance(report, Gone):
            self.give_up(event.name, report.why)
        elif isinstance(report, Unwell):
            _log.error("%s cannot serve: %s", event.name, report.why)

    def _welcome(self, state: RankState, event: Event) -> None:
        link = event.link
        assert link is not None, "a hello without a connection"
        if state.phase is not Phase.STARTING:
            _log.warning("a second process says it is %s: turned away", state.name)
            link.close()
            return
        state.link, state.phase = link, Phase.LOADING
        if self._preflight is None:
            state.send(self._configure(state.name))
        elif isinstance(event.report, Hello):
            self._preflight.came(event.report)

    def _take_in(self, state: RankState, report: Loaded) -> None:
        if report.weights_hash != self._weights:
            self.give_up(
                str(state.name),
                f"its checkpoint is another one (hash {report.weights_hash[:12]}, the "
                f"coordinator's is {self._weights[:12]})",
            )
            return
        state.loaded, state.phase = report, Phase.READY

    def _beat(self, link: RankLink) -> None:
        with self._lock:
            if not self._is_closing.is_set() and link.name in self.roster:
                self._beats.beat(link.name)

    def _start(self, name: RankName) -> None:
        assert self._starter is not None, "the cluster has not started"
        self.roster[str(name)].num_starts += 1
        self._starter.start(name)

    def _watch(self) -> None:
        while not self._is_closing.wait(_WATCH_S):
            try:
                self._look()
            except MoeServeError as error:  # a start that failed is tried again
                _log.error("%s", error)

    def _look(self) -> None:
        assert self._starter is not None, "the cluster has not started"
        for ended in self._starter.exited():
            self._tell(ended.name, f"its process {ended.why}")
        with self._lock:
            late = [(item.rank, item.seconds) for item in self._beats.late()]
            now = time.monotonic()
            due = [name for name, moment in self._due.items() if moment <= now]
            for name, _ in late:
                self._beats.forget(name)
            for name in due:
                del self._due[name]
        for name, seconds in late:
            self._tell(name, f"silent for {seconds:.1f} s")
        for name in due:
            self._start(self.roster[name].name)
        if not self.inbox.empty():
            self.on_event()

    def _tell(self, name: str, why: str) -> None:
        self.inbox.put(Event(name, self.roster[name].link, Gone(why)))
