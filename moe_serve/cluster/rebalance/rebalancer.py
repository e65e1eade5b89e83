"""When to plan, and what came of it. The engine's thread moves, this one plans and waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from experts.placement.errors import PlacementError
from experts.placement.problem.placement import Placement
from moe_serve.cluster.members.current_placement import CurrentPlacement, PlacementVersion
from moe_serve.cluster.rebalance.forecast import Forecast
from moe_serve.cluster.rebalance.load_window import LoadWindow, WindowCounts
from moe_serve.cluster.rebalance.mover import MoveEnd, Mover
from moe_serve.cluster.rebalance.proposal import Proposal, Proposer
from moe_serve.engine.routes.placement_control import (
    OUTCOMES,
    BalanceFigures,
    LastPlan,
    PlacementBrief,
    PlacementStatus,
    PlanOutcome,
    RebalanceMode,
    RebalanceState,
)
from moe_serve.errors import RebalanceError

_log = logging.getLogger(__name__)

_FRESH_S = 2.0  # as old may a judgement be
_CLOSE_S = 5.0  # for a planner that is under way; its process ends by itself


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Of a version, at a time."""

    version: int
    at: float
    found: Forecast | None


class Rebalancer:
    """Implements PlacementControl. Its thread starts with `start` and ends with `close`."""

    def __init__(
        self,
        mode: RebalanceMode,
        interval_s: float,
        current: CurrentPlacement,
        window: LoadWindow,
        proposer: Proposer,
        mover: Mover,
    ) -> None:
        self._mode, self._interval_s = mode, interval_s
        self._current, self._window = current, window
        self._proposer, self._mover = proposer, mover
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._state: RebalanceState = "idle"
        self._last: LastPlan | None = None
        self._proposal: Proposal | None = None
        self._judgement: _Judgement | None = None
        self._outcomes: Counter[PlanOutcome] = Counter()
        self._asked, self._is_closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rebalance", daemon=True)
        mover.on_end = self._moved

    def start(self, wake: Callable[[], None]) -> None:
        """`wake`: the engine, which may be idle."""
        self._wake = wake
        if self._mode != "off":
            self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    @property
    def state(self) -> RebalanceState:
        """See `PlacementControl.state`."""
        with self._lock:
            return "planning" if self._asked.is_set() else self._state

    def plan(self) -> Placement:
        """See `PlacementControl.plan`."""
        return self._current.version.placement

    def rebalance(self) -> PlacementStatus:
        """See `PlacementControl.rebalance`."""
        if self._mode == "off":
            raise RebalanceError("Nothing is moved: cluster.rebalance is 'off'.")
        with self._lock:
            if self._state != "idle" or self._asked.is_set():
                raise RebalanceError("A re-balance is under way already.")
            self._asked.set()
        return self.status()

    def brief(self) -> PlacementBrief:
        """See `PlacementControl.brief`."""
        version, state = self._current.version, self.state
        with self._lock:
            last, outcomes = self._last, dict(self._outcomes)
        return PlacementBrief(
            state=state,
            version=version.number,
            age_s=time.monotonic() - version.since,
            last=last,
            num_plans={outcome: outcomes.get(outcome, 0) for outcome in OUTCOMES},
        )

    def status(self) -> PlacementStatus:
        version, window, stall = self._current.version, self._window.look(), self._mover.times.stall
        achieved = self._judged(window, version)
        with self._lock:
            proposal, last, outcomes = self._proposal, self._last, dict(self._outcomes)
        before, predicted = (
            (None, None) if proposal is None else (proposal.before, proposal.predicted)
        )
        return PlacementStatus(
            mode=self._mode,
            state=self.state,
            version=version.number,
            age_s=time.monotonic() - version.since,
            num_counted_tokens=window.num_tokens,
            balance=BalanceFigures(
                before=None if before is None else before.balancedness,
                predicted=None if predicted is None else predicted.balancedness,
                achieved=None if achieved is None else achieved.balancedness,
            ),
            last=last,
            num_plans={outcome: outcomes.get(outcome, 0) for outcome in OUTCOMES},
            num_copies=self._mover.num_copies,
            num_bytes=self._mover.num_bytes,
            before_p99_s=stall.before_p99_s,
            during_p99_s=stall.during_p99_s,
        )

    def _judged(self, window: WindowCounts, version: PlacementVersion) -> Forecast | None:
        """How the placement does now. For a large model that takes a moment, so not each time that
        somebody asks."""
        last, now = self._judgement, time.monotonic()
        if last is None or last.version != version.number or now - last.at >= _FRESH_S:
            found = self._proposer.judge(window, version.placement)
            self._judgement = last = _Judgement(version.number, now, found)
        return last.found

    def _run(self) -> None:
        interval_s = self._interval_s if self._mode == "auto" else None
        while True:
            is_asked = self._asked.wait(interval_s)
            if self._is_closing.is_set():
                return
            with self._lock:
                is_free = self._state == "idle"
                if is_free:
                    self._state = "planning"
                self._asked.clear()
            if is_free:
                self._plan(is_asked=is_asked)

    def _plan(self, *, is_asked: bool) -> None:
        window, current = self._window.look(), self._current.version.placement
        if self._proposer.is_enough(window, current):
            window = self._window.close()  # else it goes on
        try:
            proposal = self._proposer.propose(window, current, is_asked=is_asked)
            if proposal.target is not None:
                self._begin(proposal, proposal.target)
                return
        except PlacementError as error:
            proposal = Proposal(target=None, refusal="planner", text=str(error))
        except Exception as error:  # top of the thread: the server goes on, and so do plans
            _log.exception("no plan could be made")
            proposal = Proposal(target=None, refusal="planner", text=str(error))
        assert proposal.refusal is not None, f"no plan and no reason: {proposal}"
        self._remember(proposal)
        self._ended(proposal.refusal, f"no move: {proposal.text}")

    def _begin(self, proposal: Proposal, target: Placement) -> None:
        self._remember(proposal)
        with self._lock:
            self._state = "copying"
        _log.info("a move begins: %s", proposal.text)
        self._mover.propose(target)
        self._wake()

    def _remember(self, proposal: Proposal) -> None:
        if proposal.predicted is not None:
            self._proposal = proposal  # the last with figures

    def _moved(self, end: MoveEnd) -> None:
        """On the engine's thread."""
        told = f"{end.num_copies} copies in {end.num_rounds} rounds, {end.seconds:.1f} s"
        if end.why is None:
            proposal = self._proposal
            self._ended("moved", f"{told}: {'' if proposal is None else proposal.text}")
        else:
            self._ended("away" if end.is_refused else "aborted", f"{end.why} ({told} before that)")

    def _ended(self, outcome: PlanOutcome, text: str) -> None:
        level = logging.WARNING if outcome in ("aborted", "planner") else logging.INFO
        _log.log(level, "re-balance: %s: %s", outcome, text)
        with self._lock:
            self._last, self._state = LastPlan(outcome=outcome, text=text), "idle"
            self._outcomes[outcome] += 1
