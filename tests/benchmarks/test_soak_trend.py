"""The soak's test for a flat series."""

from __future__ import annotations

import random

from soak.sample import SettleRule, quantile_of_buckets, trend_of


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


def settled(visits_per_sample: int, num_samples: int, growth: list[float]) -> tuple[int, bool]:
    """Returns samples of every 10 s. `growth` is MiB by sample; its last value holds for all later
    ones."""
    seconds = [10.0 * (i + 1) for i in range(num_samples)]
    visits = [visits_per_sample * (i + 1) for i in range(num_samples)]
    mib, own = [], 300.0
    for i in range(num_samples):
        own += growth[min(i, len(growth) - 1)]
        mib.append(own)
    return SettleRule().first_settled(seconds, visits, mib)


def test_the_warm_up_ends_when_memory_has_settled() -> None:
    """Memory grows 1 MiB a sample for 40 samples and then stays. At 100 visits a sample, 10 samples
    are 1 000 visits."""
    assert settled(100, 180, [1.0] * 40 + [0.0]) == (47, True)  # samples 37 to 47: +2 MiB
    assert settled(100, 180, [0.0]) == (10, True)
    assert settled(50, 180, [1.0] * 40 + [0.0]) == (57, True)  # slower visits, a longer warm-up
    assert settled(10, 180, [0.0]) == (89, False)  # 1 000 visits are more than half of the run


def test_a_leak_does_not_settle_and_is_judged() -> None:
    """24 MiB an hour at 5.5 visits a second is 1.2 MiB in 1 000 visits: memory counts as settled,
    and the trend shows the leak. A faster leak lasts until the warm-up's limit."""
    assert settled(54, 180, [24 / 360]) == (19, True)
    first, is_settled = settled(54, 180, [80 / 360])
    assert (first, is_settled) == (89, False)
    seconds = [10.0 * i for i in range(91)]
    assert not trend_of(seconds, [80 * at / 3600 for at in seconds]).is_flat(24.0)
