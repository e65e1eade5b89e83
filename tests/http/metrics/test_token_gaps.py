"""The histogram that counts every token equals the library's own."""

from __future__ import annotations

import random
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from moe_serve.http.metrics.page import cumulative
from moe_serve.http.metrics.recent import TokenGaps

BOUNDS = (0.001, 0.0025, 0.05, 1.0, 5.0)


def test_the_page_is_that_of_the_library() -> None:
    rng = random.Random(1)
    observed = [rng.choice([0.0, *BOUNDS, 9.0, rng.random()]) for _ in range(1000)]
    theirs = CollectorRegistry()
    histogram = Histogram("m:gap", "Between.", ["model_name"], registry=theirs, buckets=BOUNDS)
    gaps = TokenGaps(BOUNDS)
    for number, seconds in enumerate(observed):
        count = rng.randint(1, 3)
        gaps.observe(seconds, count, now=number / 50)
        if number % 300 == 0:
            gaps.snapshot()  # looking changes nothing
        for _ in range(count):
            histogram.labels("tiny").observe(seconds)
    wanted, found = _values(theirs), _page(gaps)
    assert found.keys() == wanted.keys()
    assert all(abs(found[name] - value) <= 1e-9 * max(1.0, value) for name, value in wanted.items())


def test_it_has_its_series_before_the_first_token() -> None:
    empty = TokenGaps(BOUNDS).snapshot()
    assert (set(empty.counts), empty.total) == ({0}, 0.0)


def test_percentiles_are_of_the_seconds_in_which_it_was_observed() -> None:
    now = 100.9
    gaps = TokenGaps(BOUNDS, clock=lambda: now)
    assert gaps.look() is None
    gaps.observe(0.001, 98, now)
    now = 130.2
    gaps.observe(1.0, 2, now)
    found = gaps.look()
    assert found is not None and found.count == 100
    assert found.p50 == pytest.approx(1.0, rel=0.03)
    assert found.p99 == pytest.approx(1000.0, rel=0.03)
    latest = gaps.look(10)
    assert latest is not None and latest.count == 2
    now = 161.0
    found = gaps.look()
    assert found is not None and found.count == 2, "the first second is over a minute ago"


def test_readers_on_other_threads_lose_nothing() -> None:
    gaps = TokenGaps(BOUNDS)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            gaps.look()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(20_000):
        gaps.observe(0.002, 1, time.monotonic())
    is_over.set()
    for reader in readers:
        reader.join()
    found = gaps.look()
    assert found is not None and found.count == 20_000


def _page(gaps: TokenGaps) -> dict[str, float]:
    """Returns the samples as /metrics shows them."""
    histogram = gaps.snapshot()
    buckets = cumulative(histogram.bounds, histogram.counts)
    return {
        **{f'm:gap_bucket{{le="{le}",model_name="tiny"}}': count for le, count in buckets},
        'm:gap_count{model_name="tiny"}': buckets[-1][1],
        'm:gap_sum{model_name="tiny"}': histogram.total,
    }


def _values(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in samples if "_created" not in name}
