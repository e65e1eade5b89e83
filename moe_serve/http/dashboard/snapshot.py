"""Snapshots of the server's state, a history of the last five minutes, and the log of events.

Events are found by comparing snapshots, so the other parts of the server do not need to know them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.engine.request.client import EngineClient
from moe_serve.engine.request.stats import CellState, EngineStats
from moe_serve.engine.routes.cell_placements import AnyPlacement, CellPlacements
from moe_serve.engine.routes.placement_control import PlacementBrief, PlacementControl, PlanOutcome
from moe_serve.http.generation.generation import GenerationService
from moe_serve.http.metrics.recent import RecentRequests
from moe_serve.http.metrics.scrape import OUTAGE_S

INTERVAL_S = 1.0
_NUM_SAMPLES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    at: float  # seconds since 1970
    stats: EngineStats
    placements: Mapping[
        str, PlacementBrief
    ]  # by the cell's name, which is "" on a server with a single cell
    is_draining: bool
    num_rejected: int
    ttft_ms: float | None  # the median of the last seconds
    tpot_ms: float | None


class Sources:
    """The sources of a snapshot. Reading them never waits for the engine."""

    def __init__(
        self,
        generations: GenerationService,
        recent: RecentRequests,
        placement: AnyPlacement | None,
    ) -> None:
        self.engine: EngineClient = generations.engine
        self.generations, self.recent, self.placement = generations, recent, placement

    def snapshot(self) -> Snapshot:
        """Takes a snapshot. Any thread may call it."""
        recent = self.recent
        first, following = recent.first_tokens.look(_LATELY_S), recent.next_tokens.look(_LATELY_S)
        return Snapshot(
            at=time.time(),
            stats=self.engine.stats(),
            placements={name: each.brief() for name, each in controls_of(self.placement).items()},
            is_draining=self.generations.is_draining,
            num_rejected=recent.num_rejected,
            ttft_ms=None if first is None else first.p50,
            tpot_ms=None if following is None else following.p50,
        )


def controls_of(placement: AnyPlacement | None) -> Mapping[str, PlacementControl]:
    """Returns the controls by the names of their cells. The name of a single cell is ""."""
    if placement is None:
        return {}
    if isinstance(placement, CellPlacements):
        return {f"cell-{number}": each for number, each in placement.by_cell.items()}
    return {"": placement}


_LATELY_S = 3


class History:
    """A ring buffer of samples. Any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: Snapshot | None = None
        self._samples: deque[dict[str, float | None]] = deque(maxlen=_NUM_SAMPLES)

    def add(self, now: Snapshot) -> None:
        """Adds a sample with the rates since the previous snapshot. The first snapshot adds none,
        because it has no rates.
        """
        with self._lock:
            before, self._before = self._before, now
            if before is not None and now.at > before.at:
                self._samples.append(_sample(before, now))

    def columns(self) -> dict[str, Any]:
        """Returns one list per quantity, all of the same length; `kv_used` counts pages."""
        with self._lock:
            samples = list(self._samples)
        names = (
            "t",
            "running",
            "waiting",
            "prompt_per_s",
            "generated_per_s",
            "ttft_ms",
            "tpot_ms",
            "kv_used",
            "tokens_per_step",
        )
        columns = {name: [sample[name] for sample in samples] for name in names}
        return {"interval_s": INTERVAL_S, **columns}


def _sample(before: Snapshot, now: Snapshot) -> dict[str, float | None]:
    stats, seconds = now.stats, now.at - before.at
    num_prompt = stats.counts.num_prompt_tokens - before.stats.counts.num_prompt_tokens
    num_generated = stats.counts.num_generated_tokens - before.stats.counts.num_generated_tokens
    accepted = _num_accepted(stats) - _num_accepted(before.stats)
    return {
        "t": round(now.at, 3),
        "running": stats.load.num_running,
        "waiting": stats.load.num_waiting,
        "prompt_per_s": round(max(0, num_prompt) / seconds, 1),
        "generated_per_s": round(max(0, num_generated) / seconds, 1),
        "ttft_ms": now.ttft_ms,
        "tpot_ms": now.tpot_ms,
        "kv_used": stats.load.num_used_pages,
        "tokens_per_step": tokens_per_step(num_generated, accepted),
    }


def _num_accepted(stats: EngineStats) -> int:
    return stats.counts.drafts.total.num_accepted


def tokens_per_step(num_generated: int, num_accepted: int) -> float | None:
    """Returns the mean number of tokens that a sequence got from one step: 1 without drafts, None
    without a step. A step makes one token more than it accepts.
    """
    num_steps = num_generated - num_accepted
    return round(num_generated / num_steps, 3) if num_steps > 0 else None


MAX_EVENTS = 200
_OVERLOAD_S = 10.0  # rejections closer together than this are one event
_FAILURES: tuple[PlanOutcome, ...] = ("aborted", "planner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. `kind` comes from a closed set; `text` is one sentence."""

    seq: int  # the first event has 1
    time: float  # seconds since 1970
    kind: str
    text: str


class EventLog:
    """A log of events. Any thread may add and read."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0

    def add(self, kind: str, text: str) -> None:
        with self._lock:
            self._num_events += 1
            event = Event(seq=self._num_events, time=self._clock(), kind=kind, text=text)
            self._events.append(event)

    def since(self, seq: int) -> list[Event]:
        """Returns the events after `seq`, oldest first. All events if `seq` comes from an earlier
        server run."""
        with self._lock:
            events, newest = list(self._events), self._num_events
        return [event for event in events if event.seq > seq or seq > newest]


_CELL_EVENTS: Mapping[CellState, tuple[str, str]] = {
    "starting": ("cell_added", "starts"),
    "serving": ("cell_serves", "serves"),
    "draining": ("cell_drains", "drains: its requests move away"),
    "leaving": ("cell_leaves", "leaves: its requests move away"),
    "stopping": ("cell_stops", "has no requests any more, and its ranks end"),
    "failed": ("cell_failed", "could not start"),
}


class EventWatch:
    """Compares each snapshot with the previous one and adds events, at most a second late.

    Not thread-safe: only the sampler calls it.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._before: Snapshot | None = None
        self._rejected_at: float | None = None

    def look(self, now: Snapshot) -> None:
        before, self._before = self._before, now
        if before is None:
            return
        self._ranks(before.stats, now.stats)
        self._engine(before.stats, now.stats)
        self._cells(before.stats, now.stats)
        for cell, brief in now.placements.items():
            if cell in before.placements:
                self._placement(before.placements[cell], brief, f"{cell}: " if cell else "")
        if now.is_draining and not before.is_draining:
            self._log.add("draining", "The server is shutting down and accepts no new requests.")
        if now.num_rejected > before.num_rejected and not now.is_draining:
            self._overload(before, now)

    def _ranks(self, before: EngineStats, now: EngineStats) -> None:
        num_lost, loss = now.num_lost_ranks - before.num_lost_ranks, now.last_loss.rstrip(".")
        if num_lost == 1:
            self._log.add("rank_lost", f"A rank was lost: {loss}.")
        elif num_lost > 1:
            self._log.add("rank_lost", f"{num_lost} ranks were lost, the last one: {loss}.")
        phases = {rank.name: rank.phase for rank in before.members}
        for rank in now.members:
            was_away = phases.get(rank.name, "serving") != "serving"
            if was_away and rank.phase == "serving":
                self._log.add("rank_back", f"{rank.name} is serving again.")

    def _engine(self, before: EngineStats, now: EngineStats) -> None:
        if before.outage_s <= OUTAGE_S < now.outage_s:
            self._log.add("outage", "Ranks that every step needs are missing: requests wait.")
        if now.outage_s <= OUTAGE_S < before.outage_s:
            self._log.add(
                "outage_over", f"Steps continue after an outage of {before.outage_s:.0f} s."
            )
        if before.is_alive and not now.is_alive:
            self._log.add("engine_died", f"The engine has stopped: {now.death or 'it is gone'}.")
        was_on = None if before.batching is None else before.batching.is_predictor_on
        stats = now.batching
        if stats is None or was_on is None or stats.is_predictor_on in (None, was_on):
            return
        recall = "unknown" if stats.recall is None else f"{stats.recall:.2f}"
        kind = "predictor_on" if stats.is_predictor_on else "predictor_off"
        what = "is used again" if stats.is_predictor_on else "is no longer used"
        self._log.add(kind, f"The predictor {what}: its recall is {recall}.")

    def _cells(self, before: EngineStats, now: EngineStats) -> None:
        states = {cell.name: cell.state for cell in before.cells}
        for cell in now.cells:
            was = states.pop(cell.name, None)
            if cell.state != was:
                kind, text = _CELL_EVENTS[cell.state]
                if cell.state == "serving" and was in ("draining", "leaving"):
                    kind, text = "cell_back", "takes requests again"
                note = f": {cell.note.rstrip('.')}" if cell.state == "failed" else ""
                self._log.add(kind, f"{cell.name} ({cell.ranks} {cell.role}) {text}{note}.")
        for name in states:
            self._log.add("cell_gone", f"{name} is gone.")
        said = 0 if before.scaling is None else before.scaling.num_said
        if now.scaling is not None and now.scaling.num_said > said:
            self._log.add("cells_scaled", f"Autoscaling: {now.scaling.last}")

    def _placement(self, before: PlacementBrief, now: PlacementBrief, cell: str) -> None:
        def num_more(outcome: PlanOutcome) -> int:
            return now.num_plans.get(outcome, 0) - before.num_plans.get(outcome, 0)

        text = "" if now.last is None else f": {now.last.text.rstrip('.')}"
        if num_more("moved") > 0:
            self._log.add("rebalanced", f"{cell}Experts have moved, version {now.version}{text}.")
        if any(num_more(outcome) > 0 for outcome in _FAILURES):
            self._log.add("rebalance_failed", f"{cell}No experts have moved{text}.")

    def _overload(self, before: Snapshot, now: Snapshot) -> None:
        last, self._rejected_at = self._rejected_at, now.at
        if last is None or now.at - last > _OVERLOAD_S:
            count = now.num_rejected - before.num_rejected
            waiting = now.stats.load.num_waiting
            self._log.add(
                "overload",
                f"{count} requests were not accepted, with {now.stats.load.num_running} sequences "
                f"running and {waiting} waiting.",
            )
