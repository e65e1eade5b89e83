"""Runs all kinds of clients on one server for half an hour and checks that nothing grows.

    python benchmarks/run.py soak --json build/soak.json --plot build/soak.png
    python benchmarks/run.py soak --seconds 120 --visitors 8

The exit status is 0 only if memory, descriptors, threads and /metrics are flat after the warm-up,
no visit had an unexpected result, all pages were returned, and the server ended with status 0 after
SIGTERM. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from harness.environment import write_report
from soak.sample import Sample, SettleRule, take_sample, trend_of
from soak.served import Served
from soak.visitors import LIMIT_S, VISITORS, Host

# Allowed growth in an hour, for the upper end of the 95% interval.
LIMITS = {"own_mib": 24.0, "num_fds": 8.0, "num_threads": 2.0, "num_series": 12.0}
_MAX_METRICS_BYTES = 1024  # gained after the warm-up: counters get more digits
_IDLE_LIMIT_S = 60.0
_HEARTBEAT_S = 1.0


def main() -> int:
    arguments = _parser().parse_args()
    console = Console()
    seen = Seen()
    with Served(0, 0, _HEARTBEAT_S) as served:
        samples, is_idle = asyncio.run(_soak(served, arguments, seen))
        status, _ = served.stop()
        log = served.log
    report = _report(samples, seen, arguments) | {
        "is_idle_at_end": is_idle,
        "exit_status": status,
        "num_tracebacks": log.count("Traceback"),
    }
    report["problems"] = _problems(report, arguments)
    _print(console, report)
    write_report(arguments.json, report)
    if arguments.log:
        arguments.log.write_text(log, encoding="utf-8")
    if arguments.plot:
        write_plot(arguments.plot, samples, report["warm_up_s"])
    for problem in report["problems"]:
        console.print(f"[red]{problem}[/red]")
    return 1 if report["problems"] else 0


async def _soak(
    served: Served, arguments: argparse.Namespace, seen: Seen
) -> tuple[list[Sample], bool]:
    """Returns the samples, and whether all resources were free soon after the last visit."""
    begin, stop = time.monotonic(), asyncio.Event()
    visits = asyncio.create_task(
        keep_visiting(served.url, arguments.visitors, arguments.rest, arguments.seed, seen, stop)
    )
    samples: list[Sample] = []
    while time.monotonic() - begin < arguments.seconds and not visits.done():
        await asyncio.sleep(arguments.every)
        samples.append(await _sample(served, begin, seen))
    stop.set()
    await visits
    deadline = time.monotonic() + _IDLE_LIMIT_S
    while time.monotonic() < deadline:
        sample = await _sample(served, begin, seen)
        if not sample.pages_used and not sample.num_running and not sample.num_waiting:
            return samples, True
        await asyncio.sleep(0.2)
    return samples, False


async def _sample(served: Served, begin: float, seen: Seen) -> Sample:
    num_visits = seen.num_visits
    return await asyncio.to_thread(take_sample, served.url, served.process, begin, num_visits)


def _report(samples: list[Sample], seen: Seen, arguments: argparse.Namespace) -> dict[str, Any]:
    rule = SettleRule(num_visits=arguments.settle_visits, most_mib=arguments.settle_mib)
    first, is_settled = rule.first_settled(
        [sample.seconds for sample in samples],
        [sample.num_visits for sample in samples],
        [sample.own_mib for sample in samples],
    )
    rest = samples[first:]
    if len(rest) < 4:
        raise SystemExit(f"{len(rest)} samples after the warm-up are too few: run longer.")
    seconds = [sample.seconds for sample in rest]
    trends = {
        name: trend_of(seconds, [getattr(sample, name) for sample in rest]) for name in LIMITS
    }
    return {
        "seconds": samples[-1].seconds,
        "warm_up_s": rest[0].seconds,
        "warm_up_visits": rest[0].num_visits,
        "is_settled": is_settled,
        "num_visits": seen.num_visits,
        "visits": {name: dict(counter) for name, counter in seen.counts.items()},
        "num_failures": len(seen.failures),
        "first_failures": seen.failures[:5],
        "trends_per_hour": {name: asdict(trend) for name, trend in trends.items()},
        "is_flat": {name: trends[name].is_flat(LIMITS[name]) for name in LIMITS},
        "metrics_bytes_gained": rest[-1].metrics_bytes - rest[0].metrics_bytes,
        "first": asdict(rest[0]),
        "last": asdict(rest[-1]),
        "samples": [asdict(sample) for sample in samples],
    }


def _problems(report: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    problems = [
        f"{name}: {trend['slope']:+.2f} an hour, at most {trend['high']:+.2f}; the limit is "
        f"{LIMITS[name]:+.0f}"
        for name, trend in report["trends_per_hour"].items()
        if not report["is_flat"][name] and not arguments.no_trends
    ]
    checks = {
        f"{report['num_failures']} visits saw what they should not": report["num_failures"],
        f"/metrics gained {report['metrics_bytes_gained']} bytes": report["metrics_bytes_gained"]
        > _MAX_METRICS_BYTES,
        f"pages or sequences were left {_IDLE_LIMIT_S:g} s after the end": not report[
            "is_idle_at_end"
        ],
        f"exit status {report['exit_status']}": report["exit_status"],
        f"{report['num_tracebacks']} tracebacks in the log": report["num_tracebacks"],
    }
    return problems + [text for text, is_wrong in checks.items() if is_wrong]


def _print(console: Console, report: dict[str, Any]) -> None:
    end = "settled" if report["is_settled"] else "still growing"
    console.print(
        f"warm-up: {report['warm_up_s']} s, {report['warm_up_visits']} visits, memory {end}"
    )
    table = Table(f"{report['seconds']} s", "after the warm-up", "now", "an hour (95%)")
    for name in report["first"]:
        trend = report["trends_per_hour"].get(name)
        shown = (
            f"{trend['slope']:+.2f} ({trend['low']:+.2f} to {trend['high']:+.2f})" if trend else ""
        )
        table.add_row(name, str(report["first"][name]), str(report["last"][name]), shown)
    console.print(table)
    visits = Table("visits", str(report["num_visits"]))
    for name, counts in report["visits"].items():
        visits.add_row(name, ", ".join(f"{key}: {count}" for key, count in counts.items()))
    console.print(visits)
    for failure in report["first_failures"]:
        console.print(f"[red]{failure}[/red]")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="default %(default)s")
    parser.add_argument(
        "--settle-visits", type=int, default=1000, help="number of visits of --settle-mib"
    )
    parser.add_argument(
        "--settle-mib",
        type=float,
        default=2.0,
        help="the warm-up ends when memory grew by at most this many MiB in --settle-visits visits",
    )
    parser.add_argument("--every", type=float, default=10.0, help="a sample, s, %(default)s")
    parser.add_argument("--visitors", type=int, default=12, help="at once, default %(default)s")
    parser.add_argument("--rest", type=float, default=0.5, help="between visits, s, %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--no-trends", action="store_true", help="for runs too short for them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture of the samples (PNG or SVG)")
    parser.add_argument("--log", type=Path, help="where to put the server's stderr")
    return parser


@dataclass(slots=True)
class Seen:
    """The results of the visits, by kind."""

    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in VISITORS}
    )
    failures: list[str] = field(default_factory=list)

    @property
    def num_visits(self) -> int:
        return sum(sum(counter.values()) for counter in self.counts.values())

    def note(self, name: str, outcome: str) -> None:
        self.counts[name][outcome] += 1
        if outcome not in VISITORS[name].may_see:
            self.failures.append(f"{name}: {outcome}")


# More schemas than a server caches: a full cache does not grow.
_FILLING, _NUM_FILLING = "structured output", 160


async def keep_visiting(
    url: str, num_visitors: int, rest_s: float, seed: int, seen: Seen, stop: asyncio.Event
) -> None:
    """Makes visits until `stop` is set; visits that have begun are finished."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_visitors)
    async with httpx.AsyncClient(
        base_url=url, timeout=LIMIT_S, trust_env=False, limits=limits
    ) as client:
        hosts = [Host(client, random.Random(f"{seed}-{i}")) for i in range(num_visitors)]
        for _ in range(_NUM_FILLING):
            seen.note(_FILLING, await _visit(_FILLING, hosts[0]))
        await asyncio.gather(*(_keep_visiting(host, rest_s, seen, stop) for host in hosts))


async def _keep_visiting(host: Host, rest_s: float, seen: Seen, stop: asyncio.Event) -> None:
    names = list(VISITORS)
    weights = [VISITORS[name].weight for name in names]
    while not stop.is_set():
        (name,) = host.rng.choices(names, weights)
        seen.note(name, await _visit(name, host))
        await asyncio.sleep(host.rng.expovariate(1 / rest_s) if rest_s else 0)


async def _visit(name: str, host: Host) -> str:
    try:
        return await asyncio.wait_for(VISITORS[name].visit(host), LIMIT_S)
    except asyncio.TimeoutError:
        return f"no end within {LIMIT_S:g} s"
    except (httpx.HTTPError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


_SHOWN = {
    "own_mib": "own memory, MiB",
    "num_fds": "descriptors",
    "num_threads": "threads",
    "metrics_bytes": "/metrics, bytes",
    "pages_used": "share of pages held",
}


def write_plot(path: Path, samples: Sequence[Sample], warm_up_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(_SHOWN), 1, sharex=True, figsize=(8, 1.7 * len(_SHOWN)))
    minutes = [sample.seconds / 60 for sample in samples]
    for axis, (name, label) in zip(axes, _SHOWN.items(), strict=True):
        axis.plot(minutes, [getattr(sample, name) for sample in samples], linewidth=1.2)
        axis.axvspan(0, warm_up_s / 60, alpha=0.12, color="grey")
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
        axis.margins(y=0.1)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes (grey: warm-up)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
