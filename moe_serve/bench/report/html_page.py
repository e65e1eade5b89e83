"""Writes an HTML page for one run or two: figures, distributions, and the run over time.

The page is a single file without scripts, fonts or other fetched resources, readable in light and
dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from moe_serve.bench.figures.summary import QUANTILE_STEPS
from moe_serve.bench.report.compare import compare, comparison_cells, differing_settings
from moe_serve.bench.report.report import Report
from moe_serve.bench.report.report_table import latency_rows, report_facts
from moe_serve.errors import BenchError

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotLine:
    """One line of a plot; `name` is its CSS class in the page: a or b."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The range and scale of one direction. A logarithmic axis begins above 0."""

    label: str
    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Maps a value to [0, 1]: 0 at `low`, 1 at `high`. Values outside are put on the edge."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.is_log:
            return _log_ticks(self.low, self.high)
        step = nice_step(self.high - self.low)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def nice_step(length: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, so that about five steps make `length`."""
    raw = length / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)


def plot(title: str, x: Axis, y: Axis, lines: Sequence[PlotLine]) -> str:
    """Draws one picture; `title` is the text for screen readers."""
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + inner_w * x.place(value)

    def down(value: float) -> float:
        return _TOP + inner_h * (1.0 - y.place(value))

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">',
        *_x_axis(x, across),
        *_y_axis(y, down),
    ]
    for line in lines:
        points = " ".join(
            f"{across(a):.1f},{down(b):.1f}" for a, b in zip(line.xs, line.ys, strict=True)
        )
        parts.append(f'<polyline class="line {escape(line.name)}" points="{points}"/>')
    parts.append("</svg>")
    return "".join(parts)


def _x_axis(axis: Axis, across: Callable[[float], float]) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for tick in axis.ticks():
        at = across(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 16, "middle", tick_label(tick)))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "middle", axis.label))
    return parts


def _y_axis(axis: Axis, down: Callable[[float], float]) -> list[str]:
    right = _WIDTH - _RIGHT
    parts = []
    for tick in axis.ticks():
        at = down(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(_LEFT - 6, at + 4, "end", tick_label(tick)))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text transform="translate(13 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(axis.label)}</text>"
    )
    return parts


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def tick_label(value: float) -> str:
    """Formats a number: 12000 as 12k, 0.30000000000000004 as 0.3."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 10):g}"


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times the powers of ten, or the powers alone if these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    ticks = [m * 10.0**p for p in powers for m in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5a6577; --rule: #d9dee6;
  --page: #ffffff; --card: #f6f8fa; --a: #0b62c4; --b: #c2410c; --good: #17703a; --bad: #b42318;
  --note: #7a5200; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #a3adbd; --rule: #363e4b; --page: #14181f; --card: #1c222b;
    --a: #6cb0ff; --b: #ff9d5c; --good: #6fd08f; --bad: #ff8f85; --note: #e8c268; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 24px; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 28px 0 8px; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; font-weight: 400; }
th { color: var(--soft); }
.facts td { overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin-top: 10px; }
.figures { font-variant-numeric: tabular-nums; }
.figures tr { border-bottom: 1px solid var(--rule); }
.figures td, .figures tr:first-child th:not(:first-child) { text-align: right; white-space: nowrap;
  padding: 4px 0 4px 22px; }
.figures th:first-child { white-space: nowrap; }
.better td { color: var(--good); } .worse td { color: var(--bad); }
.note { color: var(--note); margin: 6px 0; }
.mark { display: inline-block; min-width: 20px; padding: 0 5px; border-radius: 4px;
  color: var(--page); font-size: 13px; text-align: center; }
.mark.a { background: var(--a); } .mark.b { background: var(--b); }
.plots { display: grid; gap: 16px; margin-top: 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); stroke-dasharray: 6 3; }
"""


_NAMES = ("a", "b")
_SHOWN = 0.995  # of a distribution; beyond it, and below 0.005, a few would squeeze all others
_LOG_FROM = 20.0  # the ratio of largest to smallest from which an axis is logarithmic
_LATENCIES = (
    ("ttft", "Time to first token"),
    ("itl", "Between tokens (ITL)"),
    ("tpot", "Per token of an answer (TPOT)"),
    ("e2e", "End to end"),
)


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Writes the page of one report, or of two to compare."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(reports), encoding="utf-8")
    except OSError as error:
        raise BenchError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}."
        ) from None


def render(reports: Sequence[Report]) -> str:
    assert 1 <= len(reports) <= 2, "one run, or two to compare"
    title = " and ".join(dict.fromkeys(report.model for report in reports))
    body = [f"<h1>{escape(title)}</h1>"]
    body += [_run(name, report, len(reports) > 1) for name, report in _named(reports)]
    if len(reports) == 2:
        body.append(_comparison(reports[0], reports[1]))
    body.append('<div class="plots">')
    body += [_distribution(key, label, reports) for key, label in _LATENCIES]
    body += [_in_flight(reports), _throughput(reports)]
    body.append("</div>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>bench: {escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _named(reports: Sequence[Report]) -> list[tuple[str, Report]]:
    return list(zip(_NAMES, reports, strict=False))


def _run(name: str, report: Report, is_pair: bool) -> str:
    mark = f'<span class="mark {name}">{name.upper()}</span> ' if is_pair else ""
    rows = [f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in report_facts(report)]
    client = ", ".join(f"{key} {value}" for key, value in report.client.items())
    rows.append(f"<tr><th>measured</th><td>{escape(f'{report.created} from {client}')}</td></tr>")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in report.notes)
    return (
        f"<h2>{mark}{escape(report.url)}: {escape(str(report.workload.get('mode', '')))}</h2>"
        f'<table class="facts">{"".join(rows)}</table>{notes}{_latencies(report)}'
    )


def _latencies(report: Report) -> str:
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = []
    for label, spread in latency_rows(report):
        cells = "".join(f"<td>{getattr(spread, name):,.2f}</td>" for name in names)
        rows.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    table = f"<tr><th>milliseconds</th>{head}</tr>{''.join(rows)}"
    return f'<div class="wide"><table class="figures">{table}</table></div>' if rows else ""


def _comparison(a: Report, b: Report) -> str:
    heads = "".join(f"<th>{t}</th>" for t in ("", "A", "B", "B over A", "95% interval", ""))
    rows = []
    for row in compare(a, b):
        label, *cells = comparison_cells(row)
        data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr class="{row.verdict}"><th>{escape(label)}</th>{data}</tr>')
    notes = "".join(
        f'<p class="note">the runs differ in {escape(text)}</p>'
        for text in differing_settings(a, b)
    )
    table = f"<tr>{heads}</tr>{''.join(rows)}"
    return f'<h2>Compared</h2>{notes}<div class="wide"><table class="figures">{table}</table></div>'


def _figure(title: str, picture: str, reports: Sequence[Report]) -> str:
    marks = ""
    if len(reports) > 1:
        marks = "".join(f' <span class="mark {name}">{name.upper()}</span>' for name in _NAMES)
    return f"<figure><figcaption>{escape(title)}{marks}</figcaption>{picture}</figure>"


def _distribution(key: str, label: str, reports: Sequence[Report]) -> str:
    shown = int(_SHOWN * (len(QUANTILE_STEPS) - 1)) + 1
    lines = []
    for name, report in _named(reports):
        values = report.quantiles_ms.get(key) or []
        if len(values) == len(QUANTILE_STEPS):
            percents = [100 * step for step in QUANTILE_STEPS]
            lines.append(PlotLine(name=name, xs=values[1:shown], ys=percents[1:shown]))
    if not lines:
        return ""
    low = min(line.xs[0] for line in lines)
    high = max(line.xs[-1] for line in lines)
    floor = max(low, high * 1e-4)  # a logarithmic axis cannot begin at 0
    is_log = high > _LOG_FROM * floor
    x = Axis(label="milliseconds", low=floor if is_log else 0.0, high=high or 1.0, is_log=is_log)
    y = Axis(label="% at most", low=0.0, high=100.0)
    return _figure(label, plot(f"Distribution: {label}", x, y, lines), reports)


def _in_flight(reports: Sequence[Report]) -> str:
    series = [report.timeline.in_flight_B for report in reports]
    return _over_time("Requests in flight", "requests", series, reports)


def _throughput(reports: Sequence[Report]) -> str:
    series = [report.timeline.output_tok_s_B for report in reports]
    return _over_time("Output over time", "tokens/s", series, reports)


def _over_time(
    title: str, unit: str, series: Sequence[Sequence[float]], reports: Sequence[Report]
) -> str:
    lines = []
    for (name, report), values in zip(_named(reports), series, strict=True):
        bin_s = report.timeline.bin_s
        lines.append(
            PlotLine(name=name, xs=[(i + 0.5) * bin_s for i in range(len(values))], ys=values)
        )
    end = max(report.timeline.bin_s * len(v) for report, v in zip(reports, series, strict=True))
    top = max((max(values, default=0.0) for values in series), default=0.0)
    x = Axis(label="seconds since the start", low=0.0, high=end)
    y = Axis(label=unit, low=0.0, high=top * 1.05 or 1.0)
    return _figure(title, plot(title, x, y, lines), reports)
