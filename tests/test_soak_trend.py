"""When the soak calls a series flat."""

from __future__ import annotations

import random

from harness.soak.sample import quantile_of_buckets
from harness.soak.trend import trend_of


def test_a_leak_is_seen_and_noise_is_not() -> None:
    rng = random.Random(1)
    seconds = [10.0 * i for i in range(150)]
    noise = [100 + rng.gauss(0, 0.5) for _ in seconds]
    assert trend_of(seconds, noise).is_flat(5.0)
    leak = [value + 30 * at / 3600 for at, value in zip(seconds, noise, strict=True)]
    found = trend_of(seconds, leak)
    assert found.low < 30 < found.high and not found.is_flat(24.0)
    assert trend_of(seconds, [7.0] * 150).high == 0.0


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    rng = random.Random(2)
    seconds, value, steps = [10.0 * i for i in range(150)], 0.0, []
    for _ in seconds:
        value += rng.gauss(0, 1)
        steps.append(value)
    shuffled = rng.sample(steps, len(steps))
    widths = [
        found.high - found.low for found in (trend_of(seconds, steps), trend_of(seconds, shuffled))
    ]
    assert widths[0] > 2 * widths[1]


def test_a_quantile_is_its_buckets_upper_end() -> None:
    buckets = [(0.01, 90.0), (0.05, 99.0), (1.0, 100.0), (float("inf"), 100.0)]
    assert [quantile_of_buckets(buckets, share) for share in (0.5, 0.99, 1.0)] == [0.01, 0.05, 1.0]
    assert quantile_of_buckets([(0.01, 0.0)], 0.99) == 0.0
