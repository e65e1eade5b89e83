"""Figures by tier and tenant: attainment, tardiness, promises and shares, worked out by hand."""

from __future__ import annotations

from array import array
from dataclasses import asdict

import pytest

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.tier_figures import REFUSED, ServiceFigures, jain, tardiness
from moe_serve.config.tiers import TierConfig

TIERS = (
    TierConfig(name="fast", weight=4.0, ttft_s=1.0),
    TierConfig(name="slow", weight=1.0, e2e_s=10.0),
)


def record(
    index: int, tier: str, ttft_s: float, e2e_s: float, *, tenant: str = "",
    predicted: float | None = None, error: str | None = None,
) -> RequestRecord:  # fmt: skip
    """A request due at 100 s with 10 prompt tokens and an answer of 2."""
    has_failed = error is not None
    return RequestRecord(
        index=index,
        scheduled_s=100.0,
        started_s=100.0,
        end_s=100.0 + e2e_s,
        first_s=None if has_failed else 100.0 + ttft_s,
        last_s=None if has_failed else 100.0 + e2e_s,
        gaps_s=array("d") if has_failed else array("d", [e2e_s - ttft_s]),
        prompt_tokens=None if has_failed else 10,
        output_tokens=None if has_failed else 2,
        error=error,
        tier=tier,
        tenant=tenant,
        predicted_ttft_s=predicted,
    )


RECORDS = [
    record(0, "fast", 0.5, 1.0, tenant="a", predicted=0.4),  # met, promise kept
    record(1, "fast", 3.0, 4.0, tenant="a", predicted=2.0),  # 2 s late, promise broken
    record(2, "fast", 0.0, 0.0, error=REFUSED, predicted=9.0),
    record(3, "slow", 9.0, 9.5, tenant="b", predicted=1.0),  # met; it has no TTFT target
    record(4, "slow", 1.0, 13.0, tenant="b"),  # 3 s late
    record(5, "fast", 0.0, 1.0, predicted=0.5, error="deadline_exceeded"),  # promise broken
]


def test_figures_of_all_requests() -> None:
    found = ServiceFigures.of(RECORDS, TIERS, duration_s=10.0, is_strict=True)
    assert found.attained == 2 / 6 and found.goodput_per_s == pytest.approx(0.2)
    assert found.weighted_tardiness_s == pytest.approx((4 * 2 + 1 * 3) / 4)
    assert (found.num_refused, found.num_promised, found.num_kept) == (1, 3, 1)
    assert found.longest_wait_s == 9.0
    assert found.forecast_error == pytest.approx(1 / 3), "median of 0.2, 1/3 and 8/9"
    assert [(t.name, t.num, t.service_tokens) for t in found.tenants] == [
        ("a", 2, 24),
        ("b", 2, 24),
    ]
    assert found.jain == 1.0


def test_figures_of_each_tier() -> None:
    fast, slow = ServiceFigures.of(RECORDS, TIERS, duration_s=10.0).tiers
    assert (fast.num, fast.num_refused, fast.num_failed) == (4, 1, 1)
    assert fast.attained == fast.ttft_attained == 1 / 4 and fast.e2e_attained is None
    assert fast.mean_tardiness_s == 1.0 and fast.longest_wait_s == 3.0
    assert slow.attained == slow.e2e_attained == 1 / 2 and slow.ttft_attained is None
    assert slow.targets == "e2e 10000 ms"


def test_a_report_keeps_them() -> None:
    found = ServiceFigures.of(RECORDS, TIERS, duration_s=10.0)
    assert ServiceFigures.from_json(asdict(found)) == found


def test_tardiness_is_the_larger_delay() -> None:
    both = TierConfig(name="both", ttft_s=1.0, e2e_s=2.0)
    assert tardiness(record(0, "both", 1.5, 4.0), both) == 2.0
    assert tardiness(record(0, "both", 4.0, 4.5), both) == 3.0
    assert tardiness(record(0, "both", 0.5, 1.0), both) == 0.0


def test_jain_is_one_for_equal_shares() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1.0)
    assert jain([8, 0, 0, 0]) == pytest.approx(1 / 4)
    assert jain([5]) is None and jain([0, 0]) is None
