"""Samples a server's resources from the operating system and /metrics, and tests if they stay flat.

The test is a slope by least squares, with an interval. Neighbouring samples are similar, because
memory grows in steps, so the usual interval would be far too narrow. It is computed as for n (1 -
r) / (1 + r) independent samples, where r is the correlation of neighbouring residuals.
"""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
import psutil
from scipy.stats import t as student_t


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The resources at one moment; `seconds` since the start of the run, `pages_used` a share from
    0 to 1.

    The resident set includes pages of files, which the kernel takes back when other programs need
    memory.
    """

    seconds: float
    num_visits: int  # that have ended
    own_mib: float  # memory that is neither shared nor backed by a file: leaks show here
    rss_mib: float
    num_fds: int
    num_threads: int
    num_series: int
    metrics_bytes: int
    pages_used: float
    num_running: float
    num_waiting: float
    loop_lag_p99_s: float  # since the server began; the upper end of the bucket
    cpu_s: float


def take_sample(url: str, process: psutil.Process, begin: float, num_visits: int) -> Sample:
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    times, memory = process.cpu_times(), process.memory_info()
    return Sample(
        seconds=round(time.monotonic() - begin, 1),
        num_visits=num_visits,
        own_mib=round((memory.rss - getattr(memory, "shared", 0)) / 2**20, 2),
        rss_mib=round(memory.rss / 2**20, 2),
        num_fds=process.num_fds(),
        num_threads=process.num_threads(),
        num_series=len(lines),
        metrics_bytes=len(text),
        pages_used=value_of(text, "kv_cache_usage_perc"),
        num_running=value_of(text, "num_requests_running"),
        num_waiting=value_of(text, "num_requests_waiting"),
        loop_lag_p99_s=quantile_of(text, "event_loop_lag_seconds", 0.99),
        cpu_s=round(times.user + times.system, 1),
    )


def value_of(text: str, name: str) -> float:
    """Returns the sum of all series of a gauge or counter."""
    found = re.findall(rf"^moe_serve:{name}\{{.*\}} (\S+)$", text, re.M)
    assert found, f"{name} is not in /metrics"
    return sum(map(float, found))


def quantile_of(text: str, name: str, share: float) -> float:
    """Returns the upper end of the histogram's bucket with the quantile; 0 for an empty
    histogram.
    """
    return quantile_of_buckets(buckets_of(text, name), share)


def buckets_of(text: str, name: str) -> list[tuple[float, float]]:
    """Returns pairs of a bucket's upper end and the count up to it; the only label is the model."""
    pattern = rf'^moe_serve:{name}_bucket\{{le="([^"]+)".*\}} (\S+)$'
    found = [(float(end), float(count)) for end, count in re.findall(pattern, text, re.M)]
    assert found, f"{name} is not in /metrics"
    return found


def quantile_of_buckets(buckets: list[tuple[float, float]], share: float) -> float:
    total = buckets[-1][1]
    return next((end for end, count in buckets if count >= share * total), 0.0) if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The growth per hour, with a 95% interval."""

    slope: float
    low: float
    high: float

    def is_flat(self, limit: float) -> bool:
        """Returns whether the whole interval is below `limit`."""
        return self.high <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRule:
    """The rule for the end of the warm-up.

    It ends when memory has grown by at most `most_mib` in the last `num_visits` visits, and at the
    latest after `most_share` of the run, so that a leak, which never settles, is detected.
    """

    num_visits: int = 1000
    most_mib: float = 2.0
    most_share: float = 0.5

    def first_settled(
        self, seconds: Sequence[float], visits: Sequence[int], mib: Sequence[float]
    ) -> tuple[int, bool]:
        """Returns the first sample after the warm-up, and whether memory had settled by then."""
        for now in range(len(visits)):
            if seconds[now] >= self.most_share * seconds[-1]:
                return now, False
            earlier = bisect_right(visits, visits[now] - self.num_visits) - 1
            if earlier >= 0 and mib[now] - mib[earlier] <= self.most_mib:
                return now, True
        return len(visits), False


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """Fits the trend; needs at least four samples."""
    x, y = np.asarray(seconds) / 3600.0, np.asarray(values, dtype=float)
    assert len(x) >= 4, f"{len(x)} samples have no trend"
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - slope * (x - x.mean())
    variance = float((rest**2).sum())
    if variance == 0.0:
        return Trend(slope=slope, low=slope, high=slope)
    alike = float((rest[1:] * rest[:-1]).sum()) / variance
    count = max(4.0, len(x) * (1 - max(0.0, alike)) / (1 + max(0.0, alike)))
    error = math.sqrt(variance / (len(x) - 2) / (spread * count / len(x)))
    half = float(student_t.ppf(0.975, count - 2)) * error
    return Trend(slope=slope, low=slope - half, high=slope + half)
