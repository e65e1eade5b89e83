"""Starts ranks, admits and watches them, gives up lost ones and starts them again.

The engine thread handles events, and links read on threads of their own. One more thread watches
for ended processes and silence, and starts ranks that are due.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from moe_serve.cluster.control.adapter_messages import AdapterLoaded
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.messages import (
    Configure,
    Examined,
    Hello,
    Loaded,
    Loading,
    Stop,
    Unwell,
)
from moe_serve.cluster.control.rank_link import Gone, Inbox, LinkEvent, RankLink
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.cluster_adapters import CellAdapters
from moe_serve.cluster.members.preflight import PreflightRound
from moe_serve.cluster.members.rank_starter import RankStarter
from moe_serve.cluster.members.roster import Heartbeats, RankPhase, RankState, Roster
from moe_serve.errors import ChannelClosedError, ClusterError, ConfigError, MoeServeError
from moe_serve.model.load.weight_reader import LoadProgress

_log = logging.getLogger(__name__)

_WATCH_S = 0.05
_LAST_WORDS_S = 2.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0  # between two starts of a rank that keeps dying
_LASTING_S = 10.0  # a process that has served this long resets the count of failures
_CLOSE_S = 10.0  # for the watch to end
_CLOSED = LinkEvent("", None, Gone("the server ends"))  # wakes a wait


class Membership:
    """The ranks of a cell. `configure` returns the order that tells a rank what to load, and
    `weights` is the hash that its checkpoint must have.
    """

    def __init__(
        self,
        roster: Roster,
        configure: Callable[[RankName], Configure],
        weights: str,
        heartbeat_s: float,
        cell: str = "",
    ) -> None:
        """`cell` is its name if there are several."""
        self.roster, self._configure, self._weights = roster, configure, weights
        self.cell, self.prefix = cell, f"{cell}/" if cell else ""  # of ranks' names in messages
        self.inbox: Inbox = queue.SimpleQueue()
        self._starter: RankStarter | None = None
        self._preflight: PreflightRound | None = None  # while it runs
        self._beats: Heartbeats[str] = Heartbeats(heartbeat_s)
        self._heartbeat_s, self._last_look = heartbeat_s, math.inf
        self._lock = threading.Lock()  # guards the beats, the due starts and the links
        self._links: weakref.WeakSet[RankLink] = weakref.WeakSet()  # with ranks not admitted yet
        self._due: dict[str, float] = {}  # when to start a rank
        self._is_closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._start_timeout_s = math.inf  # for restarts; `start` gets the first one's
        self._loading: dict[str, tuple[int, int]] = {}
        self.on_event: Callable[[], None] = lambda: None  # wakes an idle engine
        self.is_due: Callable[[], bool] = lambda: False  # returns whether to wake without an event
        self.adapters: CellAdapters | None = None  # set where ranks load adapters
        self.on_parcel: Callable[[LinkEvent], None] = self.inbox.put  # on any thread
        self.num_lost = 0
        self.last_loss = ""

    def admit(self, channel: Channel[Any]) -> None:
        """Takes over an authenticated connection. Called on any thread."""
        with self._lock:
            if not self._is_closing.is_set():
                link = RankLink(channel, self.inbox, self._beat, self.on_parcel, self._note_adapter)
                self._links.add(link)
                return
        channel.close()

    def start(
        self,
        starter: RankStarter,
        preflight: PreflightRound,
        timeout_s: float,
        progress: LoadProgress | None,
    ) -> None:
        """Starts all ranks and waits until they have loaded; raises the error that prevents it."""
        self._starter, self._preflight = starter, preflight
        for state in self.roster.all():
            self._start(state)
        self._watcher.start()
        deadline = time.monotonic() + timeout_s
        self._pass_preflight(preflight, min(timeout_s, preflight.limit_s))
        while waiting := [s for s in self.roster.all() if s.phase is not RankPhase.READY]:
            event = self.next_event(deadline - time.monotonic())
            if event is None:
                names = ", ".join(f"{self.prefix}{s.name} ({s.phase.value})" for s in waiting)
                raise ClusterError(
                    f"after {timeout_s:g} s these ranks are not ready: {names}. Look at their "
                    "output, or raise cluster.start_timeout_s."
                )
            self._check_start(event)
            if progress is not None:
                counts = list(self._loading.values())
                progress(sum(done for done, _ in counts), sum(total for _, total in counts))
        self._start_timeout_s = timeout_s

    def _pass_preflight(self, preflight: PreflightRound, timeout_s: float) -> None:
        """Waits until all ranks are there. Raises ClusterError with every problem found.

        No rank loads before. Restarted ranks, which come later, are only checked by their weights'
        hash.
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
            self._admit(state)

    def _check_start(self, event: LinkEvent) -> None:
        """Raises on events that must not happen before all ranks have loaded."""
        if self._is_closing.is_set():
            raise ClusterError("the start was cancelled")
        name = f"{self.prefix}{event.name}"
        if isinstance(event.report, Unwell):
            raise ConfigError(f"{name} cannot serve: {event.report.why}")
        if isinstance(event.report, Gone):
            raise ClusterError(f"{name} ended while it started: {self._cause(event)}")
        if isinstance(event.report, Loaded) and self.roster[event.name].loaded is None:
            raise ClusterError(f"{name} is refused: {self._objection(event.report)}.")

    def _cause(self, event: LinkEvent) -> str:
        """Returns why a rank is gone. The end of its process, which may come just after that of its
        connection, tells more.
        """
        assert isinstance(event.report, Gone), "a rank must be gone"
        end = time.monotonic() + _LAST_WORDS_S
        while (later := self.next_event(end - time.monotonic())) is not None:
            if later.name == event.name and isinstance(later.report, Gone):
                return later.report.why
        return event.report.why

    def next_event(self, timeout_s: float) -> LinkEvent | None:
        """Waits for an event and handles it here; returns None after the time-out. Messages of
        processes already given up are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if event is _CLOSED or self._handle(event):
                return event

    def give_up(self, name: str, why: str) -> None:
        """Ends the process of a rank that can no longer be used, and starts it again."""
        state = self.roster[name]
        step = "" if state.link is None or state.link.step < 0 else f" (in step {state.link.step})"
        _log.warning("%s%s is lost%s: %s", self.prefix, name, step, why)
        self.num_lost += 1
        self.last_loss = f"{self.prefix}{name}: {why}"
        has_lasted = state.loaded is not None and time.monotonic() - state.ready_at >= _LASTING_S
        state.num_failures = 1 if has_lasted else state.num_failures + 1
        state.lose()
        with self._lock:
            self._beats.forget(name)
        if self._is_closing.is_set() or self._starter is None:
            return
        try:
            self._starter.kill(state.name)
        except MoeServeError as error:  # stuck in the kernel; closing its link has fenced it off
            _log.error("%s", error)
        self._start_later(state)

    def _start_later(self, state: RankState) -> None:
        """Schedules a start: now, or after a growing pause if its processes keep dying."""
        power = state.num_failures - 2
        pause_s = 0.0 if power < 0 else min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**power)
        with self._lock:
            self._due[str(state.name)] = time.monotonic() + pause_s

    def close(self) -> None:
        """Ends all ranks."""
        with self._lock:
            self._is_closing.set()
        self.inbox.put(_CLOSED)
        if self._watcher.is_alive():
            self._watcher.join(_CLOSE_S)  # it may be starting a process
        with self._lock:
            links = list(self._links)
        for link in links:
            with contextlib.suppress(ChannelClosedError):
                link.send(Stop())
        if self._starter is not None:
            self._starter.stop()
        for state in self.roster.all():
            state.lose()
        for link in links:
            link.close()

    def _handle(self, event: LinkEvent) -> bool:
        """Handles an event. Returns False if it comes from a process that was given up."""
        if event.name not in self.roster:
            if event.link is not None:
                event.link.close()
            return False
        state, report = self.roster[event.name], event.report
        if isinstance(report, Hello):
            self._welcome(state, event)
        elif isinstance(report, Gone):
            if _is_of(state, event, report):
                self.give_up(event.name, report.why)
        elif event.link is not state.link:
            return False
        elif isinstance(report, Loading):
            self._loading[event.name] = (report.done, report.total)
        elif isinstance(report, Loaded):
            self._take_in(state, report)
        elif isinstance(report, Unwell):
            _log.error("%s%s cannot serve: %s", self.prefix, event.name, report.why)
        return True

    def _welcome(self, state: RankState, event: LinkEvent) -> None:
        link = event.link
        assert link is not None, "a hello without a connection"
        if state.phase is not RankPhase.STARTING or state.lost_start == state.num_starts:
            _log.warning("refused a second process of %s%s", self.prefix, state.name)
            link.close()
            return
        state.link, state.phase = link, RankPhase.LOADING
        if self._preflight is None:
            self._admit(state)
        elif isinstance(event.report, Hello):
            self._preflight.came(event.report)

    def _admit(self, state: RankState) -> None:
        """Tells a rank what to load. Its heartbeats begin then."""
        if state.link is not None:
            self._beat(state.link)
        state.send(self._configure(state.name))

    def _objection(self, report: Loaded) -> str | None:
        """Returns why a loaded rank may not serve, or None if it may."""
        if report.weights_hash == self._weights:
            return None
        theirs, ours = report.weights_hash[:12], self._weights[:12]
        return f"its checkpoint differs (its hash is {theirs}, the coordinator's {ours})"

    def _take_in(self, state: RankState, report: Loaded) -> None:
        objection = self._objection(report)
        if objection is not None:
            self.give_up(str(state.name), objection)
            return
        state.loaded, state.phase, state.ready_at = report, RankPhase.READY, time.monotonic()
        if self.adapters is not None:
            self.adapters.ready(str(state.name))

    def _note_adapter(self, link: RankLink, report: AdapterLoaded) -> None:
        if self.adapters is not None:
            self.adapters.heard(link, report)

    def _beat(self, link: RankLink) -> None:
        with self._lock:
            is_known = link.name in self.roster and self.roster[link.name].link is link
            if is_known and not self._is_closing.is_set():
                self._beats.beat(link.name)

    def _start(self, state: RankState) -> None:
        assert self._starter is not None, "the cluster has not started"
        state.num_starts += 1
        state.started_at = time.monotonic()
        self._starter.start(state.name)

    def _watch(self) -> None:
        while not self._is_closing.wait(_WATCH_S):
            self._look()

    def _look(self) -> None:
        assert self._starter is not None, "the cluster has not started"
        for ended in self._starter.exited():
            self._tell(ended.name, f"its process {ended.why}")
        for state in self.roster.all():
            self._check_progress(state)
        before, self._last_look = self._last_look, time.monotonic()
        with self._lock:
            if self._last_look - before > self._heartbeat_s:
                self._beats.excuse()  # this process was stopped or starved; unread beats wait
            late = [(item.rank, item.seconds) for item in self._beats.late()]
            due = [name for name, moment in self._due.items() if moment <= self._last_look]
            for name, _ in late:
                self._beats.forget(name)
            for name in due:
                del self._due[name]
        for name, seconds in late:
            link = self.roster[name].link
            self.inbox.put(LinkEvent(name, link, Gone(f"silent for {seconds:.1f} s")))
        for name in due:
            self._start_again(self.roster[name])
        if not self.inbox.empty() or self.is_due():
            self.on_event()

    def _start_again(self, state: RankState) -> None:
        try:
            self._start(state)
        except MoeServeError as error:
            _log.error("%s%s: %s", self.prefix, state.name, error)
            state.num_failures += 1
            self._start_later(state)

    def _check_progress(self, state: RankState) -> None:
        """Gives up a process that does not become ready in time."""
        seconds = time.monotonic() - state.started_at
        is_coming = state.phase in (RankPhase.STARTING, RankPhase.LOADING)
        if is_coming and state.lost_start < state.num_starts and seconds > self._start_timeout_s:
            state.started_at = math.inf  # report it only once
            self._tell(str(state.name), f"not ready {seconds:.0f} s after its start")

    def _tell(self, name: str, why: str) -> None:
        """Reports that the process started last is gone."""
        self.inbox.put(LinkEvent(name, None, Gone(why, self.roster[name].num_starts)))


def _is_of(state: RankState, event: LinkEvent, gone: Gone) -> bool:
    """Returns True if the rank's current process is gone and was not reported before."""
    if gone.start is None:
        return event.link is not None and event.link is state.link
    return state.lost_start < gone.start == state.num_starts
