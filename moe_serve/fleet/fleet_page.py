"""Writes a plan as an HTML page: the frontier of cost against latency, the fleets, the verdict.

The page is a single file without scripts, in the style of the reports of `bench`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from moe_serve.bench.report.plot import STYLE, Axis, PlotLine, PlotMark, plot
from moe_serve.errors import ConfigError
from moe_serve.fleet.certify import Certified
from moe_serve.fleet.fleet_plan import FleetPlan
from moe_serve.fleet.fleet_table import COLUMNS, cells_of_row
from moe_serve.fleet.fleet_verdict import FleetVerdict

_STYLE = """
.dot { fill: var(--soft); opacity: 0.35; }
.kept { fill: var(--a); } .missed { fill: var(--b); }
.best { fill: var(--good); stroke: var(--page); stroke-width: 1.5; }
.legend { color: var(--soft); margin: 4px 0 0; }
.legend span { white-space: nowrap; margin-right: 12px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 5px;
  margin-right: 4px; }
.legend i.dashed { width: 18px; height: 0; border-radius: 0; border-top: 2px dashed var(--b);
  vertical-align: middle; }
.figures th, .figures td { padding-left: 8px; padding-right: 8px; }
.figures td:first-child, .figures tr:first-child th:first-child { text-align: left;
  padding-left: 0; }
.figures .left { text-align: left; white-space: normal; min-width: 220px; }
"""
_KINDS = (
    ("best", "good", "recommended"),
    ("kept", "a", "within the limits"),
    ("missed", "b", "misses the limits"),
)


def write_plan_page(path: Path, plan: FleetPlan, verdict: FleetVerdict, model: str) -> None:
    """Writes the page. Raises ConfigError."""
    try:
        path.write_text(render_plan(plan, verdict, model), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}.") from None


def render_plan(plan: FleetPlan, verdict: FleetVerdict, model: str) -> str:
    demand = plan.demand
    facts = (
        ("load", f"{len(demand.slots)} requests, {demand.whole.rate:.2f} a second"),
        ("requests", f"{demand.whole.prompt:.0f} + {demand.whole.output:.0f} tokens in the mean"),
        ("limits", f"{demand.attainment:.0%} within {demand.slo}"),
        ("search", f"{plan.num_cells} cells, {len(plan.certified)} fleets simulated"),
    )
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in facts)
    sentences = "".join(f"<p>{escape(_capital(each))}.</p>" for each in verdict.sentences)
    title = f"plan: {model}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_STYLE}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><table class="facts">{rows}</table>{sentences}'
        f'<div class="plots">{_frontier(plan)}{_searched(plan)}</div>'
        f"<h2>Simulated fleets</h2>{_table(plan)}</main></body></html>\n"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _frontier(plan: FleetPlan) -> str:
    """Draws the simulated fleets: price against P99 of TPOT, with a line along the best."""
    shown = [each for each in plan.certified if each.summary.tpot_ms is not None]
    if not shown:
        return ""
    marks = [
        PlotMark(
            name="best" if each is plan.best else "kept" if each.meets else "missed",
            x=each.fleet.price,
            y=_tpot(each),
            title=f"{each.fleet.name}: {each.fleet.price:.2f} an hour, P99 {_tpot(each):.1f} ms",
            radius=6.0 if each is plan.best else 4.5,
        )
        for each in reversed(shown)
    ]
    lines = [_stairs([(each.fleet.price, _tpot(each)) for each in shown if each.meets])]
    limit_s = plan.demand.slo.tpot_s
    x, y = _axis("price of an hour", marks, 0), _axis("TPOT P99, milliseconds", marks, 1)
    if limit_s is not None and y.low <= 1e3 * limit_s <= y.high:
        lines.append(PlotLine(name="b", xs=(x.low, x.high), ys=(1e3 * limit_s, 1e3 * limit_s)))
    picture = plot("Simulated fleets: price against TPOT", x, y, lines, marks)
    caption = "<figcaption>Cost against latency, simulated</figcaption>"
    return f"<figure>{caption}{picture}{_legend(marks, plan, has_limit=len(lines) > 1)}</figure>"


def _legend(marks: Sequence[PlotMark], plan: FleetPlan, *, has_limit: bool) -> str:
    """Explains what the picture of the simulated fleets has, and nothing else."""
    names = {mark.name for mark in marks}
    parts = [
        f'<span><i style="background:var(--{colour})"></i>{text}</span>'
        for name, colour, text in _KINDS
        if name in names
    ]
    if has_limit:
        text = f"limit of TPOT, for {plan.demand.attainment:.0%} of the requests"
        parts.append(f'<span><i class="dashed"></i>{text}</span>')
    return f'<p class="legend">{"".join(parts)}</p>'


def _searched(plan: FleetPlan) -> str:
    """Draws all fleets by formula."""
    if not plan.points:
        return ""
    marks = [
        PlotMark(name="dot", x=p.price, y=1e3 * p.step_s, title=p.name, radius=2.5)
        for p in plan.points
    ]
    line = _stairs([(p.price, 1e3 * p.step_s) for p in plan.points])
    x, y = _axis("price of an hour", marks, 0), _axis("mean step, milliseconds", marks, 1)
    picture = plot("All fleets by formula: price against step time", x, y, [line], marks)
    return (
        f"<figure><figcaption>All {len(marks)} fleets by formula</figcaption>{picture}"
        '<p class="legend">line: nothing is both cheaper and faster</p></figure>'
    )


def _tpot(each: Certified) -> float:
    assert each.summary.tpot_ms is not None, "only fleets with a TPOT are drawn"
    return each.summary.tpot_ms.p99


def _stairs(points: Iterable[tuple[float, float]]) -> PlotLine:
    """Returns the line along the points that no other point beats in both directions."""
    xs: list[float] = []
    ys: list[float] = []
    for x, y in sorted(points):
        if not ys or y < ys[-1]:
            if ys:
                xs.append(x)
                ys.append(ys[-1])
            xs.append(x)
            ys.append(y)
    return PlotLine(name="a", xs=xs, ys=ys)


def _axis(label: str, marks: Sequence[PlotMark], direction: int) -> Axis:
    values = [(mark.x, mark.y)[direction] for mark in marks]
    low, high = min(values), max(values)
    if high > 20 * max(low, 1e-9):
        return Axis(label=label, low=low / 1.1, high=high * 1.1, is_log=True)
    return Axis(label=label, low=0.0, high=high * 1.08)


def _table(plan: FleetPlan) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = []
    for each in (*plan.certified, *(() if plan.one_device is None else (plan.one_device,))):
        name, *figures = cells_of_row(each)
        data = "".join(f"<td>{escape(cell)}</td>" for cell in figures)
        kind = "better" if each is plan.best else ""
        rows.append(f'<tr class="{kind}"><td class="left">{escape(name)}</td>{data}</tr>')
    note = (
        "TTFT and TPOT in milliseconds; an hour and per M (million tokens) in the unit of --fleet"
    )
    return (
        f'<div class="wide"><table class="figures"><tr>{heads}</tr>{"".join(rows)}</table></div>'
        f'<p class="legend">{note}</p>'
    )
