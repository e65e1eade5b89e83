"""Compares policies with FIFO and priority, and states which bars they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deadlines.verdict import Verdict

Figure = Callable[[Verdict], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One requirement on one trace: what was found, over all seeds, and what is asked for."""

    trace: str
    what: str
    found: float
    lowest: float  # of the seeds
    highest: float
    asked: str
    is_kept: bool

    def row(self) -> tuple[str, ...]:
        spread = f"{self.lowest:.3g} to {self.highest:.3g}"
        return (self.trace, self.what, f"{self.found:.3g}", spread, self.asked, _word(self.is_kept))


def _word(is_kept: bool) -> str:
    return "kept" if is_kept else "MISSED"


class Bench:
    """All verdicts, found by trace, load and policy."""

    def __init__(self, verdicts: Iterable[Verdict]) -> None:
        self._by: dict[tuple[str, float, str, int], Verdict] = {
            (v.trace, v.load, v.policy, v.seed): v for v in verdicts
        }
        self.traces = list(dict.fromkeys(key[0] for key in self._by))
        self._seeds = sorted({key[3] for key in self._by})

    def has(self, trace: str, load: float, *policies: str) -> bool:
        """Returns whether there is a seed with which all these policies were judged."""
        return bool(self.at(trace, load, *policies))

    def at(self, trace: str, load: float, policy: str, *others: str) -> list[Verdict]:
        """Returns the verdicts on a policy, of the seeds with which the others were judged, too."""
        seeds = [
            seed
            for seed in self._seeds
            if all((trace, load, name, seed) in self._by for name in (policy, *others))
        ]
        return [self._by[trace, load, policy, seed] for seed in seeds]

    def mean(self, trace: str, load: float, policy: str, figure: Figure) -> float:
        return float(np.mean([figure(v) for v in self.at(trace, load, policy)]))

    def ratios(
        self, trace: str, load: float, policy: str, other: str, figure: Figure
    ) -> list[float]:
        """Returns the seeds' own ratios to another policy."""
        pairs = zip(
            self.at(trace, load, policy, other), self.at(trace, load, other, policy), strict=True
        )
        return [_ratio(figure(a), figure(b)) for a, b in pairs]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0 if not a else float("inf")


def bars_of(bench: Bench, policy: str, refusing: str) -> list[Bar]:
    """Returns the bars of a policy, and of the same one that refuses."""
    bars: list[Bar] = []
    for trace in bench.traces:
        for load in (0.5, 0.6, 0.7):
            if bench.has(trace, load, policy, "fifo"):
                bars += _harm(bench, trace, load, policy)
        for load, tardiness in ((1.2, 0.15), (1.4, 0.35)):
            if bench.has(trace, load, policy, "fifo"):
                bars += _overload(bench, trace, load, policy, tardiness)
        if bench.has(trace, 1.2, policy, "fifo"):
            bars += _top(bench, trace, policy)
        for load in (1.2, 1.3, 1.4):
            if bench.has(trace, load, refusing, policy):
                bars += _promises(bench, trace, load, policy, refusing)
    return bars


def _bar(
    trace: str, what: str, values: Sequence[float], *, least: float | None = None,
    most: float | None = None,
) -> Bar:  # fmt: skip
    found = float(np.mean(values))
    asked = f">= {least:g}" if least is not None else f"<= {most:g}"
    is_kept = (least is None or found >= least) and (most is None or found <= most)
    return Bar(
        trace=trace, what=what, found=found, lowest=min(values), highest=max(values), asked=asked,
        is_kept=is_kept,
    )  # fmt: skip


def _harm(bench: Bench, trace: str, load: float, policy: str) -> list[Bar]:
    """Bars below the capacity: within 2% of FIFO."""

    def of(figure: Figure) -> list[float]:
        return bench.ratios(trace, load, policy, "fifo", figure)

    return [
        _bar(trace, f"{load}: tokens/s over FIFO", of(lambda v: v.tokens_per_s), least=0.98),
        _bar(trace, f"{load}: P99 TTFT over FIFO", of(lambda v: v.p99_ttft), most=1.02),
        _bar(trace, f"{load}: P99 TPOT over FIFO", of(lambda v: v.p99_tpot), most=1.02),
    ]


def _overload(bench: Bench, trace: str, load: float, policy: str, most: float) -> list[Bar]:
    met: Figure = lambda v: v.attained  # noqa: E731
    late: Figure = lambda v: v.tardiness  # noqa: E731
    least = 1.2 if load < 1.3 else 2.0
    bars = [
        _bar(
            trace, f"{load}: goodput over FIFO", bench.ratios(trace, load, policy, "fifo", met),
            least=2.0,
        ),
        _bar(
            trace, f"{load}: weighted tardiness over FIFO",
            bench.ratios(trace, load, policy, "fifo", late), most=most,
        ),
        _bar(
            trace, f"{load}: longest wait over max_wait_s",
            [v.longest_wait / v.max_wait for v in bench.at(trace, load, policy)], most=1.02,
        ),
    ]  # fmt: skip
    if bench.has(trace, load, policy, "priority"):
        bars += [
            _bar(
                trace, f"{load}: goodput over priority",
                bench.ratios(trace, load, policy, "priority", met), least=least,
            ),
            _bar(
                trace, f"{load}: weighted tardiness over priority",
                bench.ratios(trace, load, policy, "priority", late), most=0.7,
            ),
        ]  # fmt: skip
    return bars


def _top(bench: Bench, trace: str, policy: str) -> list[Bar]:
    at = bench.at(trace, 1.2, policy)
    of_fifo = bench.ratios(trace, 1.2, policy, "fifo", lambda v: v.top_p99)
    tokens = bench.ratios(trace, 1.2, policy, "fifo", lambda v: v.tokens_per_s)
    return [
        _bar(trace, "1.2: top tier met", [v.top_attained for v in at], least=0.96),
        _bar(trace, "1.2: top P99 TTFT over target", [v.p99_over_target for v in at], most=4.0),
        _bar(trace, "1.2: top P99 TTFT over FIFO", of_fifo, most=0.15),
        _bar(trace, "1.2: tokens/s over FIFO", tokens, least=0.97),
    ]


def _promises(bench: Bench, trace: str, load: float, policy: str, refusing: str) -> list[Bar]:
    """Bars of a policy that refuses. The requests it refused are looked up in the run that refused
    none."""
    strict = bench.at(trace, load, refusing, policy)
    plain = bench.at(trace, load, policy, refusing)
    bars: list[Bar] = []
    if all(v.promised for v in strict):
        kept = [v.kept / v.promised for v in strict]
        bars.append(_bar(trace, f"{load}: promises kept", kept, least=0.95))
        top = [v.p99_over_target for v in strict]
        bars.append(_bar(trace, f"{load}: top P99 TTFT over target, refusing", top, most=1.0))
    if all(v.refused for v in strict):
        right = [
            len(set(s.refused) & set(p.missed)) / len(s.refused)
            for s, p in zip(strict, plain, strict=True)
        ]
        bars.append(_bar(trace, f"{load}: refused would have missed", right, least=0.9))
    errors = [v.forecast_error for v in strict if v.forecast_error is not None]
    if errors:
        bars.append(_bar(trace, f"{load}: median error of forecasts", errors, most=0.2))
    return bars
