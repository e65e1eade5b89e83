"""The choice between loading and computing, by tables."""

from __future__ import annotations

import pytest

from moe_serve.engine.schedule.load_or_compute import LoadOrCompute

TOKENS, BYTES = 1000, 3_000_000


def rule(compute_s: float | None, read_rate: float | None) -> LoadOrCompute:
    made = LoadOrCompute()
    made.compute_s = None if compute_s is None else compute_s / TOKENS
    made.read_rate = read_rate
    return made


@pytest.mark.parametrize(
    ("compute_s", "read_rate", "is_load"),
    [
        (0.3, 1e9, True),  # 3 ms and the first byte
        (0.3, 1e7, False),  # the bytes alone take as long
        (0.3, 1.05e7, False),  # faster, but not by the margin
        (0.3, 1.5e7, True),
        (0.004, 1e9, False),  # the first byte counts
        (None, 1e5, True),  # nothing to compare with
        (0.3, None, True),
    ],
)
def test_the_faster_way_by_a_margin(
    compute_s: float | None, read_rate: float | None, is_load: bool
) -> None:
    assert rule(compute_s, read_rate).decide(TOKENS, BYTES, 0).is_load == is_load


def test_queued_bytes_count() -> None:
    slow = rule(0.3, 3e7)
    assert slow.decide(TOKENS, BYTES, 0).is_load
    assert not slow.decide(TOKENS, BYTES, 2 * BYTES).is_load


@pytest.mark.parametrize(
    ("compute_s", "read_rate", "patience_s", "deadline_s"),
    [
        (0.3, 1e9, 0.3, 0.3),  # four times the load is less
        (0.3, 1.5e7, 0.3, 0.808),
        (0.3, None, 0.3, 0.3),  # the rate is not known: no reason to wait for less
        (None, 1e9, 1.0, 1.0),
        (0.004, 1e12, 0.02, 0.25),  # threads may wait for their turns
        (60.0, 1e9, 5.0, 5.0),
    ],
)
def test_a_request_waits_as_long_as_it_would_compute(
    compute_s: float | None, read_rate: float | None, patience_s: float, deadline_s: float
) -> None:
    decision = rule(compute_s, read_rate).decide(TOKENS, BYTES, 0)
    assert decision.patience_s == pytest.approx(patience_s)
    assert decision.deadline_s == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("share", "seconds", "is_too_slow"),
    [
        (0.01, 0.06, False),  # too soon to tell
        (0.01, 0.08, True),  # all of it would take 8 s
        (0.5, 0.3, False),  # 0.6 s
        (0.5, 0.54, False),  # the margin
        (0.5, 0.56, True),
        (0.0, 0.2, False),  # nothing is read: threads may wait for their turns
        (0.0, 0.26, True),
    ],
)
def test_a_load_is_judged_by_what_was_read(share: float, seconds: float, is_too_slow: bool) -> None:
    decision = rule(1.0, 1e9).decide(TOKENS, BYTES, 0)
    assert decision.is_too_slow(share, seconds) == is_too_slow
    assert not rule(None, 1e9).decide(TOKENS, BYTES, 0).is_too_slow(0.0, 60.0)


def test_one_load_tells_that_a_disk_is_slow_and_a_probe_that_it_is_fast() -> None:
    measured = rule(0.3, 1e9)
    measured.note_load(2**12, 1.0)
    assert measured.read_rate is not None and measured.read_rate > 1e6, "a page says little"
    measured.note_load(2**24, 2.0)
    assert measured.read_rate < 2 * 2**24 / 2.0
    measured.replace_read_rate(2**18, 2**18 / 1e9)
    assert measured.read_rate == pytest.approx(1e9)
