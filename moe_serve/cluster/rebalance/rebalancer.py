"""Decides when to plan, and records the result. It plans on its own thread; the engine's thread
moves experts.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement
from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.cluster.control.epoch import sparse_layers
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.members.current_placement import CurrentPlacement, PlacementVersion
from moe_serve.cluster.members.rank_calls import RankCalls
from moe_serve.cluster.members.roster import Roster
from moe_serve.cluster.rebalance.mover import MoveEnd, Mover, MoverLimits
from moe_serve.cluster.rebalance.planner import Plan
from moe_serve.cluster.rebalance.proposal import (
    Forecast,
    LoadWindow,
    PlanLimits,
    Proposal,
    Proposer,
    WindowCounts,
)
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
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.errors import RebalanceError

_log = logging.getLogger(__name__)

_FRESH_S = 2.0  # a judgement is reused for this long
_CLOSE_S = 5.0  # wait for a planner under way; its process ends by itself


@dataclass(frozen=True, slots=True)
class _Judgement:
    """The forecast of a version at a time."""

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
        clock: Clock = REAL_CLOCK,
    ) -> None:
        self._mode, self._interval_s = mode, interval_s
        self._current, self._window = current, window
        self._proposer, self._mover, self._clock = proposer, mover, clock
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._state: RebalanceState = "idle"
        self._last: LastPlan | None = None
        self._proposal: Proposal | None = None  # the last with figures
        self._move_text = ""  # of the plan that is being carried out
        self._judgement: _Judgement | None = None
        self._outcomes: Counter[PlanOutcome] = Counter()
        self._asked, self._is_closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rebalance", daemon=True)
        mover.on_end = self._moved

    def start(self, wake: Callable[[], None]) -> None:
        """Starts the thread; `wake` wakes the engine, which may be idle."""
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
        self._check_ranks()
        if self._mode == "off":
            raise RebalanceError("Nothing is moved: cluster.rebalance is 'off'.")
        with self._lock:
            if self._state != "idle" or self._asked.is_set():
                raise RebalanceError(
                    "A plan or a move is already in progress: wait until it has ended."
                )
            self._asked.set()
        return self.status()

    def apply(self, target: Placement) -> PlacementStatus:
        """See `PlacementControl.apply`."""
        self._check_ranks()
        if self._mode == "off":
            raise RebalanceError(
                "Nothing is moved: cluster.rebalance is 'off'; start the server with 'manual' or "
                "'auto', or with cluster.placement."
            )
        with self._lock:
            if self._state != "idle" or self._asked.is_set():
                raise RebalanceError(
                    "A plan or a move is already in progress: wait until it has ended."
                )
            self._state = "copying"
        try:
            version = self._current.version
            proposal = self._proposer.given(self._window.look(), version.placement, target)
            if version.placement == target:
                self._ended("nothing", "nothing to move: the given plan is the placement in force")
                return self.status()
            self._begin(proposal, target)
        except PlacementError as error:
            with self._lock:
                self._state = "idle"
            raise RebalanceError(f"The plan does not fit, and nothing was moved: {error}") from None
        except BaseException:
            with self._lock:
                self._state = "idle"
            raise
        return self.status()

    def _check_ranks(self) -> None:
        if (
            self._current.version.placement.num_ranks < 2
        ):  # a cell with one expert rank beside larger cells
            raise RebalanceError("Nothing is moved: a single expert rank has all experts.")

    def brief(self) -> PlacementBrief:
        """See `PlacementControl.brief`."""
        version, state = self._current.version, self.state
        with self._lock:
            last, outcomes = self._last, dict(self._outcomes)
        return PlacementBrief(
            state=state,
            version=version.number,
            age_s=self._clock() - version.since,
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
            age_s=self._clock() - version.since,
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
        """Forecasts the present placement. A large model takes a moment, so the result is reused
        for _FRESH_S."""
        last, now = self._judgement, self._clock()
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
            window = self._window.close()  # otherwise it keeps counting
        try:
            proposal = self._proposer.propose(window, current, is_asked=is_asked)
            if proposal.target is not None:
                self._begin(proposal, proposal.target)
                return
        except PlacementError as error:
            proposal = Proposal(target=None, refusal="planner", text=str(error))
        except Exception as error:  # top of the thread: serving and planning continue
            _log.exception("no plan could be made")
            proposal = Proposal(target=None, refusal="planner", text=str(error))
        assert proposal.refusal is not None, f"no plan and no reason: {proposal}"
        self._remember(proposal)
        self._ended(proposal.refusal, f"no move: {proposal.text}")

    def _begin(self, proposal: Proposal, target: Placement) -> None:
        self._remember(proposal)
        self._move_text = proposal.text
        with self._lock:
            self._state = "copying"
        _log.info("a move begins: %s", proposal.text)
        self._mover.propose(target)
        self._wake()

    def _remember(self, proposal: Proposal) -> None:
        if proposal.predicted is not None:
            self._proposal = proposal

    def _moved(self, end: MoveEnd) -> None:
        """Records the end of a move, on the engine's thread."""
        told = f"{end.num_copies} copies in {end.num_rounds} rounds, {end.seconds:.1f} s"
        if end.why is None:
            self._ended("moved", f"{told}: {self._move_text}")
        else:
            self._ended("away" if end.is_refused else "aborted", f"{end.why} ({told} before that)")

    def _ended(self, outcome: PlanOutcome, text: str) -> None:
        level = logging.WARNING if outcome in ("aborted", "planner") else logging.INFO
        _log.log(level, "rebalance: %s: %s", outcome, text)
        with self._lock:
            self._last, self._state = LastPlan(outcome=outcome, text=text), "idle"
            self._outcomes[outcome] += 1


_WIDEST = 4  # bytes of a weight


def make_mover(
    model: ClusterModel, roster: Roster, calls: RankCalls, current: CurrentPlacement
) -> Mover:
    cluster, spec = model.config.cluster, model.spec
    limits = MoverLimits(
        room=cluster.rebalance_max_moves,
        bytes_per_s=cluster.rebalance_bytes_per_s,
        expert_bytes=3 * spec.width * spec.expert_width * _WIDEST,
    )
    return Mover(roster, calls.send, current, limits)


def make_rebalancer(
    model: ClusterModel,
    current: CurrentPlacement,
    mover: Mover,
    routes: RouteListeners,
    plan: Plan,
) -> Rebalancer:
    """Makes the rebalancer. Unless rebalancing is off, it listens to `routes` from now on."""
    cluster, layers = model.config.cluster, sparse_layers(model.spec)
    window = LoadWindow(len(layers), model.spec.router.num_experts)
    if cluster.rebalance != "off":
        routes.add(window)
    limits = PlanLimits(
        layers=tuple(layers),
        top_k=model.spec.router.top_k,
        num_attention_ranks=cluster.attention_ranks,
        slots=tuple(model.slots_per_layer()),
        max_moves=cluster.rebalance_max_moves,
        min_gain=cluster.rebalance_min_gain,
        objective=cluster.rebalance_objective,
    )
    return Rebalancer(
        cluster.rebalance,
        cluster.rebalance_interval_s,
        current,
        window,
        Proposer(limits, plan),
        mover,
    )
