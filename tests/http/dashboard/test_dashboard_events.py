"""Events are found by comparing snapshots; the history and the shown times are bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_serve.engine.request.stats import (
    CellState,
    CellStatus,
    EngineCounts,
    EngineLoad,
    EngineStats,
    PolicyStats,
    RankPhase,
    RankStatus,
    ScalingStats,
)
from moe_serve.engine.routes.placement_control import OUTCOMES, LastPlan, PlacementBrief
from moe_serve.http.dashboard.snapshot import MAX_EVENTS, EventLog, EventWatch, History, Snapshot
from moe_serve.http.metrics.recent import RecentTimes

STATS = EngineStats(
    num_steps=1,
    load=EngineLoad(num_running=2, num_waiting=3, num_pages=10, num_free_pages=4),
    counts=EngineCounts(num_prompt_tokens=100, num_generated_tokens=50),
)
BRIEF = PlacementBrief(
    state="idle", version=1, age_s=1.0, last=None, num_plans=dict.fromkeys(OUTCOMES, 0)
)
CALM = Snapshot(
    at=1000.0, stats=STATS, placements={"": BRIEF}, is_draining=False, num_rejected=0, ttft_ms=None,
    tpot_ms=None,
)  # fmt: skip


def rank(phase: RankPhase) -> RankStatus:
    return RankStatus(name="expert-1", pool="expert", phase=phase, num_restarts=0, busy_ratio=None)


def after(*snapshots: Snapshot) -> list[tuple[str, str]]:
    """Returns the events that a watch finds in these snapshots, one a second."""
    log = EventLog()
    watch = EventWatch(log)
    for number, snapshot in enumerate(snapshots):
        watch.look(replace(snapshot, at=snapshot.at + number))
    return [(event.kind, event.text) for event in log.since(0)]


def with_stats(**changes: Any) -> Snapshot:
    return replace(CALM, stats=replace(STATS, **changes))


def test_nothing_happens_and_nothing_is_told() -> None:
    assert after(CALM, CALM, with_stats(num_steps=9, load=replace(STATS.load, num_running=0))) == []


def test_a_rank_is_lost_and_comes_back() -> None:
    lost = with_stats(num_lost_ranks=1, last_loss="expert-1: silent", members=(rank("starting"),))
    back = with_stats(num_lost_ranks=1, last_loss="expert-1: silent", members=(rank("serving"),))
    here = with_stats(members=(rank("serving"),))
    assert after(here, lost, lost, back, back) == [
        ("rank_lost", "A rank was lost: expert-1: silent."),
        ("rank_back", "expert-1 is serving again."),
    ]
    both = with_stats(num_lost_ranks=2, last_loss="expert-1: silent.", members=())
    assert after(here, both) == [
        ("rank_lost", "2 ranks were lost, the last one: expert-1: silent.")
    ]


def test_cells_come_and_go() -> None:
    def cells(**states: CellState) -> Snapshot:
        made = [
            CellStatus(name=name.replace("_", "-"), role="both", ranks="1A1E", state=state)
            for name, state in states.items()
        ]
        why = [replace(cell, note="no room.") if cell.state == "failed" else cell for cell in made]
        return with_stats(cells=tuple(why))

    two = cells(cell_0="serving", cell_1="serving")
    told = after(
        two,
        cells(cell_0="draining", cell_1="serving", cell_2="starting"),
        cells(cell_0="leaving", cell_1="serving", cell_2="serving"),
        cells(cell_0="serving", cell_1="serving", cell_2="stopping", cell_3="failed"),
        two,
    )
    assert told == [
        ("cell_drains", "cell-0 (1A1E both) drains: its requests move away."),
        ("cell_added", "cell-2 (1A1E both) starts."),
        ("cell_leaves", "cell-0 (1A1E both) leaves: its requests move away."),
        ("cell_serves", "cell-2 (1A1E both) serves."),
        ("cell_back", "cell-0 (1A1E both) takes requests again."),
        ("cell_stops", "cell-2 (1A1E both) has no requests any more, and its ranks end."),
        ("cell_failed", "cell-3 (1A1E both) could not start: no room."),
        ("cell_gone", "cell-2 is gone."),
        ("cell_gone", "cell-3 is gone."),
    ]


def test_what_autoscaling_says_is_an_event() -> None:
    none = ScalingStats(policy="target", wanted={"both": 1}, num_decisions={})
    said = replace(none, last="cell-1 is added.", num_said=1)
    snapshots = [with_stats(scaling=each) for each in (None, none, said, said)]
    assert after(*snapshots) == [("cells_scaled", "Autoscaling: cell-1 is added.")]


def test_experts_have_moved_or_not() -> None:
    def plans(outcome: str, text: str, cell: str = "") -> Snapshot:
        last: Any = LastPlan(outcome=outcome, text=text)  # type: ignore[arg-type]
        counts: Any = dict(BRIEF.num_plans) | {outcome: 1}
        brief = replace(BRIEF, version=2, last=last, num_plans=counts)
        return replace(CALM, placements={cell: brief})

    assert after(CALM, plans("moved", "5 copies")) == [
        ("rebalanced", "Experts have moved, version 2: 5 copies.")
    ]
    assert after(CALM, plans("aborted", "a rank died.")) == [
        ("rebalance_failed", "No experts have moved: a rank died.")
    ]
    assert after(CALM, plans("gain", "too little")) == [], "a plan that is not worth it is no event"
    cells = replace(CALM, placements={"cell-0": BRIEF, "cell-1": BRIEF})
    assert after(cells, plans("moved", "5 copies", "cell-1")) == [
        ("rebalanced", "cell-1: Experts have moved, version 2: 5 copies.")
    ]


def test_the_predictor_is_given_up_and_taken_back() -> None:
    on = with_stats(batching=PolicyStats(policy="expert-aware", recall=0.5, is_predictor_on=True))
    off = with_stats(batching=PolicyStats(policy="fifo", recall=0.1, is_predictor_on=False))
    kinds = [kind for kind, _ in after(CALM, on, off, off, on)]
    assert kinds == ["predictor_off", "predictor_on"]


def test_draining_outages_death_and_overload() -> None:
    assert [k for k, _ in after(CALM, replace(CALM, is_draining=True))] == ["draining"]
    dead = with_stats(is_alive=False, death="ValueError: x")
    assert after(CALM, dead) == [("engine_died", "The engine has stopped: ValueError: x.")]
    kinds = [k for k, _ in after(CALM, with_stats(outage_s=0.5), with_stats(outage_s=4.0), CALM)]
    assert kinds == ["outage", "outage_over"]
    full = [replace(CALM, num_rejected=count) for count in (0, 5, 9, 14)]
    ((kind, text),) = after(*full)
    assert kind == "overload" and text.startswith("5 requests"), "close together they are one"
    later = replace(full[-1], at=CALM.at + 60)
    assert len(after(full[0], full[1], later)) == 2
    assert after(CALM, replace(CALM, num_rejected=5, is_draining=True))[-1][0] == "draining"


def test_the_log_is_bounded_and_tells_what_is_new() -> None:
    log = EventLog()
    for number in range(MAX_EVENTS + 50):
        log.add("overload", f"number {number}")
    events = log.since(0)
    assert len(events) == MAX_EVENTS
    assert [event.seq for event in log.since(248)] == [249, 250]
    assert log.since(250) == []
    assert len(log.since(251)) == MAX_EVENTS, "whoever knows more knew an earlier server"


def test_the_history_is_bounded_and_has_rates() -> None:
    history = History()
    assert history.columns()["t"] == []
    for number in range(400):
        counts = EngineCounts(num_prompt_tokens=10 * number, num_generated_tokens=4 * number)
        stats = replace(STATS, counts=counts)
        history.add(replace(CALM, at=1000.0 + 2 * number, stats=stats, ttft_ms=5.0))
    columns = history.columns()
    assert {len(c) for name, c in columns.items() if name != "interval_s"} == {300}
    assert set(columns["prompt_per_s"]) == {5.0} and set(columns["generated_per_s"]) == {2.0}
    assert (columns["kv_used"][0], columns["ttft_ms"][0], columns["tpot_ms"][0]) == (6, 5.0, None)
    history.add(replace(CALM, at=1798.0))
    assert len(history.columns()["t"]) == 300, "no time has passed: no rate"


def test_recent_times_forget_and_weigh() -> None:
    now = 100.0
    times = RecentTimes(lambda: now)
    assert times.look() is None
    times.add(0.001, 98)
    now = 130.0
    times.add(1.0)
    times.add(0.0)
    found = times.look()
    assert found is not None and found.count == 100
    assert found.p50 == pytest.approx(1.0, rel=0.03) == found.p90
    assert found.p99 == pytest.approx(1.0, rel=0.03), "one of a hundred lies above"
    latest = times.look(10)
    assert latest is not None and latest.count == 2
    assert latest.p99 == pytest.approx(1000.0, rel=0.03)
    now = 161.0
    found = times.look()
    assert found is not None and found.count == 2
    now = 300.0
    assert times.look() is None
