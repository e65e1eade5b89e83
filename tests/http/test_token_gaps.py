"""The histogram that is counted for every token, held to the library's own."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from moe_serve.http.token_gaps import TokenGaps

BOUNDS = (0.001, 0.0025, 0.05, 1.0, 5.0)


def test_the_page_is_that_of_the_library() -> None:
    rng = random.Random(1)
    observed = [rng.choice([0.0, *BOUNDS, 9.0, rng.random()]) for _ in range(1000)]
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("m:gap", "Between.", ["model_name"], registry=theirs, buckets=BOUNDS)
    gaps = TokenGaps("m:gap", "Between.", "tiny", BOUNDS)
    ours.register(gaps)
    for seconds in observed:
        count = rng.randint(1, 3)
        gaps.observe(seconds, count)
        for _ in range(count):
            histogram.labels("tiny").observe(seconds)
    wanted, found = _values(theirs), _values(ours)
    assert found.keys() == wanted.keys()
    assert all(abs(found[name] - value) <= 1e-9 * max(1.0, value) for name, value in wanted.items())


def test_it_has_its_series_before_the_first_token() -> None:
    registry = CollectorRegistry()
    registry.register(TokenGaps("m:gap", "Between.", "tiny", BOUNDS))
    assert set(_values(registry).values()) == {0.0}


def _values(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in samples if "_created" not in name}
