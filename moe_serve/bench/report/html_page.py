"""Writes an HTML page for one run or two: figures, distributions, and the run over time.

The page is a single file without scripts, fonts or other fetched resources, readable in light and
dark mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from moe_serve.bench.figures.summary import QUANTILE_STEPS
from moe_serve.bench.report.compare import compare, comparison_cells, differing_settings
from moe_serve.bench.report.plot import STYLE, Axis, PlotLine, plot
from moe_serve.bench.report.report import Report
from moe_serve.bench.report.report_table import TIER_HEADS, latency_rows, report_facts, tier_rows
from moe_serve.errors import BenchError

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
        f'<table class="facts">{"".join(rows)}</table>{notes}{_latencies(report)}{_tiers(report)}'
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


def _tiers(report: Report) -> str:
    if report.service is None:
        return ""
    head = "".join(f"<th>{name}</th>" for name in TIER_HEADS)
    rows = []
    for name, *cells in tier_rows(report.service):
        data = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th>{escape(name)}</th>{data}</tr>")
    table = f"<tr>{head}</tr>{''.join(rows)}"
    return f'<div class="wide"><table class="figures">{table}</table></div>'


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
