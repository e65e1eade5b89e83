"""Deadlines of workflows: even at first, then by past runs; bounded whatever clients do."""

from __future__ import annotations

import pytest

from moe_serve.engine.service.workflows import Workflows

SHARES = {"plan": 0.2, "search": 0.7, "write": 1.0}


def run_once(workflows: Workflows, name: str, start_s: float) -> list[float]:
    """Lets a run of 10 s take its stages -> when each was due, from the start."""
    due: list[float] = []
    begun_s = start_s
    for stage, share in SHARES.items():
        due.append(workflows.due_s("t", name, stage, 60.0, begun_s) - start_s)
        begun_s = start_s + 10.0 * share
        workflows.ended("t", name, stage, begun_s)
    return due


def test_stages_share_the_time_evenly_until_twenty_runs_are_known() -> None:
    workflows = Workflows()
    assert run_once(workflows, "report/0", 0.0) == [60.0, 60.0, 60.0], "the first run is unknown"
    for number in range(1, 20):
        assert run_once(workflows, f"report/{number}", 1000.0 * number) == pytest.approx(
            [20.0, 40.0, 60.0]
        )
    # Each run ended before the next began, as it was idle; so 19 are known when the 20th begins.
    run_once(workflows, "report/20", 20_000.0)
    assert run_once(workflows, "report/21", 21_000.0) == pytest.approx([12.0, 42.0, 60.0])


def test_the_deadline_counts_from_the_first_request() -> None:
    workflows = Workflows()
    assert workflows.due_s("t", "w/1", "only", 60.0, 100.0) == 160.0
    assert workflows.due_s("t", "w/1", "only", 60.0, 130.0) == 160.0
    assert workflows.due_s("u", "w/1", "only", 60.0, 130.0) == 190.0, "of another tenant"


def test_workflows_that_never_end_are_bounded_state() -> None:
    workflows = Workflows()
    for number in range(5000):
        workflows.due_s("t", f"kind {number % 900}/{number}", f"s{number}", 60.0, number * 0.001)
    assert workflows.num_open <= 1024 and len(workflows._kinds) <= 256
    for number in range(500):
        workflows.due_s("t", "one/1", f"stage {number}", 60.0, 10.0)
        workflows.ended("t", "one/1", f"stage {number}", 10.0)
    assert len(workflows._kinds["t", "one"].shares) <= 64
    assert len(workflows._runs["t", "one/1"].ends_s) <= 64
    assert workflows.due_s("t", "one/1", "stage 499", 60.0, 11.0) == 70.0, "due at the end"
