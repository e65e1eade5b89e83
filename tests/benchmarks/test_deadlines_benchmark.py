"""`benchmarks/run.py deadlines` and `lengths`: their bars, gaps and ranks, worked out by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from deadlines.bars import Bench, bars_of
from deadlines.fairness import largest_gap
from deadlines.oracle import most_in_time
from deadlines.verdict import Verdict
from lengths.stream import kendall_tau
from moe_serve.bench.figures.request_record import RequestRecord

FIFO = Verdict(
    trace="conv", load=1.2, seed=0, policy="fifo", attained=0.3, tardiness=10.0, top_attained=0.1,
    top_p99=40.0, top_target=1.0, by_tier=(0.1,), tokens_per_s=100.0, longest_wait=30.0,
    max_wait=90.0, p99_ttft=30.0, p99_tpot=0.1, num_failed=0, num_preempted=0.0, promised=0, kept=0,
    forecast_error=None, refused=(), missed=(1, 2, 3), cpu_s=1.0,
)  # fmt: skip
ATC = replace(
    FIFO, policy="atc", attained=0.9, tardiness=1.0, top_attained=0.97, top_p99=3.0,
    tokens_per_s=98.0, longest_wait=95.0, missed=(2, 3),
)  # fmt: skip
REFUSING = replace(
    ATC, policy="atc+refuse", promised=100, kept=96, refused=(2, 3, 4, 5), forecast_error=0.3
)


def found(*verdicts: Verdict) -> dict[str, tuple[float, bool]]:
    bars = bars_of(Bench(verdicts), "atc", "atc+refuse")
    return {bar.what: (bar.found, bar.is_kept) for bar in bars}


def test_bars_are_ratios_of_the_same_seed() -> None:
    bars = found(FIFO, ATC, REFUSING)
    assert bars["1.2: goodput over FIFO"] == (pytest.approx(3.0), True)
    assert bars["1.2: weighted tardiness over FIFO"] == (pytest.approx(0.1), True)
    assert bars["1.2: longest wait over max_wait_s"] == (pytest.approx(95 / 90), False)
    assert bars["1.2: top P99 TTFT over FIFO"] == (pytest.approx(3 / 40), True)
    assert bars["1.2: promises kept"] == (pytest.approx(0.96), True)
    assert bars["1.2: refused would have missed"] == (0.5, False), "2 and 3 of 2, 3, 4, 5"
    assert bars["1.2: median error of forecasts"] == (0.3, False)
    assert "1.2: goodput over priority" not in bars, "priority was not run"


def test_a_mean_is_of_the_ratios_of_all_seeds() -> None:
    second = [replace(each, seed=1, attained=0.5) for each in (FIFO, ATC)]
    assert found(FIFO, ATC, *second)["1.2: goodput over FIFO"] == (pytest.approx(2.0), True)


def record(tenant: str, due: float, first: float, *later: float) -> RequestRecord:
    return RequestRecord(
        index=0, scheduled_s=due, started_s=due, end_s=(first, *later)[-1], first_s=first,
        gaps_s=array("d", np.diff([first, *later])), prompt_tokens=10, tier="t", tenant=tenant,
    )  # fmt: skip


def test_gaps_count_only_while_both_tenants_wait() -> None:
    """From 2 s to 6 s both wait. Tenant a gets a prompt of 10 tokens and 3 tokens of 2 in it, b
    nothing: 16. Before and after, one of them has no request that waits."""
    records = [
        record("a", 0.0, 1.0), record("a", 1.0, 3.0, 4.0, 5.0), record("a", 3.0, 8.0),
        record("b", 2.0, 6.0),
    ]  # fmt: skip
    assert largest_gap(records, until_s=100.0) == 10 + 3 * 2
    assert largest_gap(records, until_s=3.5) == 10 + 1 * 2
    assert largest_gap(records[:3], until_s=100.0) == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_has_more_in_time(seed: int) -> None:
    """Against all subsets of eight jobs, each in order of arrival."""
    rng = np.random.default_rng(seed)
    starts, work = np.sort(rng.uniform(0, 6, 8)), rng.uniform(0.3, 3, 8)

    def is_in_time(jobs: tuple[int, ...]) -> bool:
        now = 0.0
        for job in jobs:
            now = max(now, starts[job]) + work[job]
            if now > starts[job] + 3.0:
                return False
        return True

    sets = (jobs for size in range(9) for jobs in combinations(range(8), size))
    best = max(len(jobs) for jobs in sets if is_in_time(jobs))
    assert most_in_time(starts.tolist(), work.tolist(), 3.0) == best


def test_kendalls_tau() -> None:
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(a, a) == 1.0 and kendall_tau(a, -a) == -1.0
    assert kendall_tau(a, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx((5 - 1) / 6)
    assert kendall_tau(a, np.zeros(4)) == 0.0
