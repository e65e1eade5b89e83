"""Samples a server's resources from the operating system and from its /metrics."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import httpx
import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`seconds` since the run began. `pages_used` is a share, 0 to 1.

    The resident set also has pages of files, which the kernel takes back when others need memory.
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
    """Sum all series of a gauge or counter."""
    found = re.findall(rf"^moe_serve:{name}\{{.*\}} (\S+)$", text, re.M)
    assert found, f"{name} is not in /metrics"
    return sum(map(float, found))


def quantile_of(text: str, name: str, share: float) -> float:
    """The upper end of the histogram's bucket that has the quantile; 0 of an empty one."""
    return quantile_of_buckets(buckets_of(text, name), share)


def buckets_of(text: str, name: str) -> list[tuple[float, float]]:
    """(upper end, how many are not above it) of a histogram without other labels than the model."""
    pattern = rf'^moe_serve:{name}_bucket\{{le="([^"]+)".*\}} (\S+)$'
    found = [(float(end), float(count)) for end, count in re.findall(pattern, text, re.M)]
    assert found, f"{name} is not in /metrics"
    return found


def quantile_of_buckets(buckets: list[tuple[float, float]], share: float) -> float:
    total = buckets[-1][1]
    return next((end for end, count in buckets if count >= share * total), 0.0) if total else 0.0
