"""Draws plots as SVG, and holds the style of the pages that show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

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
class PlotMark:
    """One point; `name` is its CSS class, `title` the text that a pointer over it shows."""

    name: str
    x: float
    y: float
    title: str
    radius: float = 4.0


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


def plot(
    title: str, x: Axis, y: Axis, lines: Sequence[PlotLine], marks: Sequence[PlotMark] = ()
) -> str:
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
    for mark in marks:
        parts.append(
            f'<circle class="{escape(mark.name)}" r="{mark.radius:g}" cx="{across(mark.x):.1f}" '
            f'cy="{down(mark.y):.1f}"><title>{escape(mark.title)}</title></circle>'
        )
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
