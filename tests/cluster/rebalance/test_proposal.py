"""Loads as they are counted, and the plans that follow from them or are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from experts.placement.placement_error import PlacementError
from experts.placement.problem.placement import Placement, contiguous
from moe_serve.cluster.rebalance.planner import PlanAnswer, PlanJob, plan_in_process, problem_of
from moe_serve.cluster.rebalance.proposal import LoadWindow, PlanLimits, Proposer, WindowCounts
from moe_serve.engine.routes.route_records import RouteRecord

LAYERS, E = (1, 3), 4
NOW = contiguous(LAYERS, E, 2)  # experts 0, 1 | 2, 3
BETTER = replace(NOW, ranks_of=dict.fromkeys(LAYERS, ((0,), (1,), (1,), (0,))))
LIMITS = PlanLimits(
    layers=LAYERS,
    top_k=2,
    num_attention_ranks=2,
    slots=(2, 2),
    max_moves=2,
    min_gain=0.1,
    objective="tokens",
)


def record(sequence_id: int, ids_NLK: np.ndarray) -> RouteRecord:
    return RouteRecord(
        request_id=f"r{sequence_id}",
        sequence_id=sequence_id,
        start=0,
        num_prompt_tokens=1,
        token_ids_N=np.zeros(len(ids_NLK), dtype=np.int32),
        expert_ids_NLK=ids_NLK.astype(np.uint8),
    )


def skewed(num_tokens: int = 400) -> WindowCounts:
    """Rank 0 has three quarters of the choices, experts 0 and 1 most of all."""
    counts_LE = np.tile([3.0, 3.0, 1.0, 1.0], (len(LAYERS), 1)) * num_tokens / 4
    return WindowCounts(counts_LE=counts_LE, num_tokens=num_tokens)


def test_counts_of_the_steps_it_asked_for() -> None:
    window = LoadWindow(2, E)
    assert set(window.wants(0, {7: None, 8: None})) == {7, 8}  # type: ignore[dict-item]
    assert not window.wants(1, {7: None, 9: None})  # type: ignore[dict-item]
    ids_NLK = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 3]]])
    window.take([record(7, ids_NLK), record(9, ids_NLK)])
    assert window.look().num_tokens == 2
    assert window.look().counts_LE.tolist() == [[2, 1, 1, 0], [0, 0, 2, 2]]
    assert window.look().rows_per_step == pytest.approx(2.0)
    window.take([record(7, ids_NLK)])  # somebody else asked
    assert window.close().num_tokens == 2 and window.look().num_tokens == 0


def test_long_prompts_are_thinned_and_weighed() -> None:
    window = LoadWindow(1, E)
    window.wants(8, {1: None})  # type: ignore[dict-item]
    window.take([record(1, np.tile([[[0]], [[3]]], (500, 1, 1)))])
    seen = window.look()
    assert seen.num_tokens == 128 and seen.counts_LE.sum() == 1000
    assert abs(seen.counts_LE[0, 0] - 500) < 150 and not seen.counts_LE[0, 1:3].any()


def test_forecast_by_hand() -> None:
    """Experts carry 3, 3, 1, 1 of 8: 6 and 2 on the ranks, 4 and 4 after; with expert 0 on both
    4.5 and 3.5."""
    asked = proposer(NOW)
    before, after = (asked.judge(skewed(), each) for each in (NOW, BETTER))
    assert before is not None and after is not None
    assert before.balancedness == pytest.approx(4 / 6) and before.busiest == pytest.approx(1.5)
    assert after.balancedness == 1.0 and before.gain_to(after) == pytest.approx(1 / 3)
    both = replace(NOW, ranks_of=dict.fromkeys(LAYERS, ((0, 1), (0,), (1,), (1,))))
    loose = Proposer(replace(LIMITS, slots=(3, 3)), plan_in_process)
    spread = loose.judge(skewed(), both)
    assert spread is not None and spread.busiest == pytest.approx(4.5 / 4)
    assert asked.judge(skewed(63), NOW) is None


def test_few_rows_are_judged_by_activated_experts() -> None:
    """20 rows of two attention ranks choose 2 of 4 experts each: 10 rows an expert, below 16; each
    is activated nearly always, so ranks are nearly even whoever has the hot ones."""
    few = replace(skewed(), sum_log_rows=10 * math.log(10.0), num_steps=10)
    for objective, is_activated in (("auto", True), ("activated", True), ("tokens", False)):
        asked = Proposer(replace(LIMITS, objective=objective), plan_in_process)  # type: ignore[arg-type]
        found = asked.judge(few, NOW)
        assert found is not None and (found.busiest < 1.01) == is_activated, objective
    many = replace(few, sum_log_rows=10 * math.log(40.0))
    found = Proposer(replace(LIMITS, objective="auto"), plan_in_process).judge(many, NOW)
    assert found is not None and found.busiest == pytest.approx(1.5)


def proposer(target: Placement | str, scenarios: list[str] | None = None) -> Proposer:
    """`scenarios`: filled with those of the last plan."""
    seen = [] if scenarios is None else scenarios

    def plan(job: PlanJob) -> PlanAnswer:
        problem, seen[:] = problem_of(job), job.scenarios
        assert problem.move is not None and problem.move.max_copies_per_layer == 2
        assert problem.loads.scenarios[-1].startswith("window ")
        if isinstance(target, str):
            return PlanAnswer(why=target)
        return PlanAnswer(ranks_of=[target.ranks_of[layer] for layer in job.layers])

    return Proposer(LIMITS, plan)


def test_proposed_with_its_numbers() -> None:
    proposal = proposer(BETTER).propose(skewed(), NOW)
    assert proposal.target == BETTER and proposal.refusal is None
    assert proposal.text == (
        "balancedness 0.667 -> 1.000 predicted, 33.3% less for the busiest rank (rows)"
    )


@pytest.mark.parametrize(
    ("target", "num_tokens", "refusal", "words"),
    [
        (BETTER, 63, "window", "63 tokens were counted, in one of 8 steps; at least 64 are needed"),
        (NOW, 400, "nothing", "balancedness 0.667 -> 0.667"),
        ("out of ideas", 400, "planner", "out of ideas"),
    ],
)
def test_refused(target: Placement | str, num_tokens: int, refusal: str, words: str) -> None:
    proposal = proposer(target).propose(skewed(num_tokens), NOW)
    assert proposal.target is None and proposal.refusal == refusal and words in proposal.text


def test_who_asks_gets_a_plan_from_older_windows() -> None:
    asked = proposer(BETTER)
    few = skewed(10)
    assert asked.propose(few, NOW, is_asked=True).refusal == "window", "there is none yet"
    asked.propose(skewed(), NOW)
    assert asked.propose(few, NOW).refusal == "window"
    assert asked.propose(few, NOW, is_asked=True).target == BETTER


def test_too_small_a_gain_is_refused() -> None:
    nearly = WindowCounts(counts_LE=np.tile([1.05, 1.0, 1.0, 0.95], (2, 1)), num_tokens=300)
    proposal = proposer(BETTER).propose(nearly, NOW)
    assert proposal.refusal == "gain" and proposal.text.endswith("at least 10% are required")


def test_the_last_four_windows_are_scenarios() -> None:
    seen: list[str] = []
    asked = proposer(BETTER, seen)
    for _ in range(6):
        asked.propose(skewed(), NOW)
    assert seen == ["window 3", "window 4", "window 5", "window 6"]


def test_a_plan_that_does_not_fit_is_refused() -> None:
    crowded = replace(NOW, ranks_of=dict.fromkeys(LAYERS, ((0,), (0,), (0,), (1,))))
    proposal = proposer(crowded).propose(skewed(), NOW)
    assert proposal.refusal == "planner"
    assert proposal.text == (
        "The plan gives rank 0 3 experts of layer 1, but the rank has 2 slots (set "
        "cluster.rebalance_spare_slots at the start of the server to have more)."
    )


def test_the_planner_of_a_process() -> None:
    """The search, in a process of its own, within its budget of moves."""
    proposal = Proposer(LIMITS, plan_in_process).propose(skewed(), NOW)
    assert proposal.target is not None and proposal.predicted is not None, proposal.text
    assert proposal.predicted.balancedness == 1.0


def test_a_planner_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_serve.cluster.rebalance.planner._MODULE", "no_such_module")
    with pytest.raises(PlacementError, match="ended with status 1: .*No module named"):
        plan_in_process(
            PlanJob(
                counts=b"",
                layers=(),
                scenarios=(),
                num_experts=1,
                ranks_of=(),
                slots=(),
                max_moves=1,
                top_k=1,
            )
        )
