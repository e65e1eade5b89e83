"""Compares two runs: differences, their intervals if the requests were saved, and a table.

The intervals come from a bootstrap: the requests of both runs are drawn again with replacement.
R = requests of a run, V = their values (a request has one TTFT and many gaps), N = resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.figures.summary import Samples, Slo, Summary, itl_of
from moe_serve.bench.report.report import Report

_NUM_RESAMPLES = 1000
_MIN_RESAMPLES = 100
_MAX_WEIGHTS = 50_000_000  # drawn for one interval; with more values there are fewer resamples
_AT_ONCE = 1_000_000
_LOW, _HIGH = 2.5, 97.5
_PERCENTILES = {"p50": 0.5, "p99": 0.99}
_STYLES = {"better": "green", "worse": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledRuns:
    """All values of a run in order, each with the request it belongs to."""

    values_V: np.ndarray
    request_V: np.ndarray
    num_requests: int

    @classmethod
    def of(cls, groups: Sequence[np.ndarray]) -> _PooledRuns:
        values_V = np.concatenate(groups)
        request_V = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        order_V = np.argsort(values_V, kind="stable")
        return cls(
            values_V=values_V[order_V], request_V=request_V[order_V], num_requests=len(groups)
        )

    def statistics(self, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns the statistics of `num` resamples, each [N]. A request drawn twice counts all its
        values twice."""
        blocks = [self._block(size, rng) for size in self._sizes(num)]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _sizes(self, num: int) -> Iterator[int]:
        at_once = max(1, _AT_ONCE // len(self.values_V))
        while num > 0:
            yield min(num, at_once)
            num -= at_once

    def _block(self, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        share = np.full(self.num_requests, 1.0 / self.num_requests)
        drawn_NR = rng.multinomial(self.num_requests, share, size=num)
        weights_NV = drawn_NR[:, self.request_V]
        below_NV = np.cumsum(weights_NV, axis=1)
        total_N = below_NV[:, -1]
        found = {"mean": weights_NV @ self.values_V / total_N}
        for name, level in _PERCENTILES.items():
            first_N = np.argmax(below_NV >= level * total_N[:, None], axis=1)
            found[name] = self.values_V[first_N]
        return found


def change_intervals(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """Returns 95% intervals of statistic(b) / statistic(a) - 1, for mean, p50 and p99.

    `a` and `b` have the values of each request. A percentile is the smallest value for which at
    least this share of the values is not above it. A statistic of `a` that is 0 in some resample
    has no interval.
    """
    num_values = sum(len(group) for group in (*a, *b))
    num = max(_MIN_RESAMPLES, min(_NUM_RESAMPLES, _MAX_WEIGHTS // num_values))
    old, new = _PooledRuns.of(a).statistics(num, rng), _PooledRuns.of(b).statistics(num, rng)
    intervals = {}
    for name in old:
        if old[name].min() > 0:
            low, high = np.percentile(new[name] / old[name] - 1, (_LOW, _HIGH))
            intervals[name] = (float(low), float(high))
    return intervals


_STATISTICS = ("mean", "p50", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One row. `change` is (b - a) / a; its interval holds 95% of the resamples."""

    label: str
    unit: str
    a: float | None
    b: float | None
    is_less_better: bool
    interval: tuple[float, float] | None = None

    @property
    def change(self) -> float | None:
        if self.a is None or self.b is None or self.a == 0 or self.unit == "%":
            return None
        return self.b / self.a - 1

    @property
    def verdict(self) -> str:
        """Returns better or worse if the interval excludes 0, else an empty string."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return ""
        return "better" if (self.interval[1] < 0) == self.is_less_better else "worse"


def compare(a: Report, b: Report, seed: int = 0) -> list[Difference]:
    rng = np.random.default_rng(seed)
    return [*_rates(a, b), *_latencies(a, b, rng), *_tiers(a, b, rng)]


def differing_settings(a: Report, b: Report) -> list[str]:
    """Returns the workload settings that differ, as "name: a, b"; with such differences the runs
    may not be comparable."""
    names = sorted({*a.workload, *b.workload} - {"mode", "is_open"})
    found = []
    for name in ("model", *names):
        old = a.model if name == "model" else a.workload.get(name)
        new = b.model if name == "model" else b.workload.get(name)
        if old != new:
            found.append(f"{name}: {old}, {new}")
    old, new = (_unit(report.summary) for report in (a, b))
    if old != new:
        found.append(
            f"output and TPOT count different things: {old}, {new}; these rows are not comparable"
        )
    old, new = (report.summary.goodput and report.summary.goodput.slo for report in (a, b))
    if old != new:
        found.append(f"slo: {old} against {new}; goodput is not compared")
    return found


def _unit(summary: Summary) -> str:
    """Returns the unit of output: for a server without usage, events are counted, and each may hold
    several tokens."""
    return "tokens" if summary.has_usage or not summary.num_ok else "events"


def _rates(a: Report, b: Report) -> list[Difference]:
    """Returns rows of rates, which have no interval: a run has one value of a rate."""
    x, y = a.summary, b.summary
    rows = [
        Difference(label="answered", unit="", a=x.num_ok, b=y.num_ok, is_less_better=False),
        Difference(label="failed", unit="", a=x.num_failed, b=y.num_failed, is_less_better=True),
    ]
    rates = [
        ("requests/s", x.requests_per_s, y.requests_per_s),
        ("output tokens/s", x.output_tok_s, y.output_tok_s),
        ("input tokens/s", x.input_tok_s, y.input_tok_s),
    ]
    if x.goodput is not None and y.goodput is not None and x.goodput.slo == y.goodput.slo:
        rates.append(("goodput, requests/s", x.goodput.requests_per_s, y.goodput.requests_per_s))
    for label, old, new in rates:
        rows.append(Difference(label=label, unit="", a=old, b=new, is_less_better=False))
    share = Difference(
        label="prompt tokens cached", unit="%", is_less_better=False,
        a=None if x.cached_share is None else 100 * x.cached_share,
        b=None if y.cached_share is None else 100 * y.cached_share,
    )  # fmt: skip
    return rows if share.a is None and share.b is None else [*rows, share]


def _latencies(a: Report, b: Report, rng: np.random.Generator) -> list[Difference]:
    rows = []
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2e")):
        old = getattr(a.summary, f"{name}_ms")
        new = getattr(b.summary, f"{name}_ms")
        if old is None and new is None:
            continue
        groups = _groups(a.records, name), _groups(b.records, name)
        intervals = change_intervals(*groups, rng) if all(groups) else {}
        for statistic in _STATISTICS:
            rows.append(
                Difference(
                    label=f"{label} {statistic}",
                    unit="ms",
                    a=None if old is None else getattr(old, statistic),
                    b=None if new is None else getattr(new, statistic),
                    is_less_better=True,
                    interval=intervals.get(statistic),
                )
            )
    return rows


def _tiers(a: Report, b: Report, rng: np.random.Generator) -> Iterator[Difference]:
    """Yields rows of the runs' tiers: goodput and tardiness of all, then each tier's share of
    requests that met its targets, and its TTFT."""
    x, y = a.service, b.service
    if x is None or y is None:
        return
    for label, name, is_less_better in (
        ("met their tier's targets, requests/s", "goodput_per_s", False),
        ("weighted tardiness, s", "weighted_tardiness_s", True),
        ("refused", "num_refused", True),
    ):
        old, new = getattr(x, name), getattr(y, name)
        yield Difference(label=label, unit="", a=old, b=new, is_less_better=is_less_better)
    others = {tier.name: tier for tier in y.tiers}
    for old in x.tiers:
        new = others.get(old.name)
        if new is None or new.targets != old.targets:
            continue
        yield Difference(
            label=f"{old.name}: met {old.targets or 'its targets'}",
            unit="%",
            a=100 * old.attained,
            b=100 * new.attained,
            is_less_better=False,
            interval=_interval(a, b, old.name, "attained", rng).get("mean"),
        )
        found = _interval(a, b, old.name, "ttft", rng)
        for statistic in ("p50", "p99"):
            yield Difference(
                label=f"{old.name}: TTFT {statistic}",
                unit="ms",
                a=None if old.ttft_ms is None else getattr(old.ttft_ms, statistic),
                b=None if new.ttft_ms is None else getattr(new.ttft_ms, statistic),
                is_less_better=True,
                interval=found.get(statistic),
            )


def _interval(
    a: Report, b: Report, tier: str, name: str, rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """Returns the intervals of one tier's values; none without saved requests."""
    old, new = _tier_values(a, tier, name), _tier_values(b, tier, name)
    return change_intervals(old, new, rng) if old and new else {}


def _tier_values(report: Report, tier: str, name: str) -> list[np.ndarray]:
    """Returns the values of a tier's requests: its TTFT, or 1 if it met all targets, else 0."""
    records = [record for record in report.records if record.tier == tier]
    if name == "ttft":
        return _groups(records, "ttft")
    rows = report.workload.get("tiers") or {}
    limits = rows.get(tier, {}) if isinstance(rows, dict) else {}
    slo = Slo(**{target: limits.get(target) for target in ("ttft_s", "tpot_s", "e2e_s")})
    return [np.array([float(slo.is_met(record))]) for record in records]


def _groups(records: Sequence[RequestRecord], name: str) -> list[np.ndarray]:
    """Returns the values of each request together: the gaps of one answer are not independent of
    each other."""
    ok = [record for record in records if record.is_ok]
    if name == "itl":
        groups = [itl_of([record]) for record in ok]
        return [group for group in groups if len(group)]
    values = getattr(Samples.of(ok), f"{name}_R")
    return [np.array([value]) for value in values]


def print_comparison(console: Console, a: Report, b: Report) -> None:
    console.print(Text(f"A  {a.model} at {a.url}, {a.created}: {a.workload['mode']}"))
    console.print(Text(f"B  {b.model} at {b.url}, {b.created}: {b.workload['mode']}"))
    table = Table("")
    for name in ("A", "B", "B over A", "95% interval", ""):
        table.add_column(name, justify="left" if not name else "right")
    for row in compare(a, b):
        table.add_row(*comparison_cells(row), style=_STYLES.get(row.verdict, ""))
    console.print(table)
    if not (a.records and b.records):
        console.print("no intervals: they need both runs saved with --save-requests", style="dim")
    for text in differing_settings(a, b):
        console.print(Text(f"note: the runs differ in {text}"), style="yellow")


def comparison_cells(row: Difference) -> tuple[str, ...]:
    """Returns the cells of a row: label, A, B, change, interval, verdict."""
    change = "" if row.change is None else f"{row.change:+.1%}"
    interval = "" if row.interval is None else f"{row.interval[0]:+.1%} to {row.interval[1]:+.1%}"
    label = f"{row.label} ({row.unit})" if row.unit else row.label
    return label, _number(row.a), _number(row.b), change, interval, row.verdict


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
