"""Renders a picture as SVG, in the light and dark colours of the documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

_STYLE = """\
  .paper { fill: #ffffff; stroke: #d0d7de }
  .room { fill: #f6f8fa; stroke: #afb8c1 }
  .box { stroke-width: 1.5 }
  .http { fill: #ddf4ff; stroke: #0969da }
  .engine { fill: #fff8c5; stroke: #9a6700 }
  .attention { fill: #dafbe1; stroke: #1a7f37 }
  .experts { fill: #fbefff; stroke: #8250df }
  .transport { fill: #ffffff; stroke: #57606a; stroke-dasharray: 5 3 }
  .name { font-size: 15px; font-weight: 600; fill: #1f2328 }
  .text { font-size: 12px; fill: #424a53 }
  .what { font-size: 12px; font-style: italic; fill: #424a53 }
  .line { stroke: #57606a; stroke-width: 1.7; fill: none }
  .head { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #30363d }
    .room { fill: #161b22; stroke: #484f58 }
    .http { fill: #0c2d6b; stroke: #58a6ff }
    .engine { fill: #3b2300; stroke: #d29922 }
    .attention { fill: #04260f; stroke: #3fb950 }
    .experts { fill: #271052; stroke: #bc8cff }
    .transport { fill: #161b22; stroke: #8b949e }
    .name { fill: #f0f6fc }
    .text, .what { fill: #c9d1d9 }
    .line { stroke: #8b949e }
    .head { fill: #8b949e }
  }"""
_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_ARROW_HEAD = (
    '<marker id="to" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/></marker>'
)


@dataclass(slots=True)
class Picture:
    """A picture; sizes and positions are pixels from the upper left. Screen readers read
    `description`.
    """

    title: str
    description: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, kind: str, x: float, y: float, width: float, height: float) -> None:
        """Draws a box of this kind: http, engine, attention, experts, transport or room."""
        style = "room" if kind == "room" else f"box {kind}"
        self.parts.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="{min(8, height / 4):g}"/>'
        )

    def text(self, kind: str, x: float, y: float, words: str, *, anchor: str = "start") -> None:
        """Draws one line of text: a name, a text, or the label of an arrow."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{where}>{escape(words)}</text>')

    def upright(self, x: float, y: float, words: str) -> None:
        turn = f'transform="translate({x:g} {y:g}) rotate(-90)"'
        self.parts.append(f'<text class="text" text-anchor="middle" {turn}>{escape(words)}</text>')

    def named_box(
        self, kind: str, x: float, y: float, width: float, height: float, lines: list[str]
    ) -> None:
        """Draws a box whose first line is its name."""
        self.box(kind, x, y, width, height)
        self.text("name", x + 14, y + 25, lines[0])
        for i, line in enumerate(lines[1:]):
            self.text("text", x + 14, y + 47 + 18 * i, line)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#to)"/>'
        )

    def render(self) -> str:
        w, h = self.width, self.height
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" '
            f'height="{h}" role="img" aria-labelledby="title desc" font-family="{_FONT}">'
        )
        paper = f'<rect class="paper" x="0.5" y="0.5" width="{w - 1}" height="{h - 1}" rx="10"/>'
        lines = [
            head,
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="desc">{escape(self.description)}</desc>',
            f"<style>\n{_STYLE}\n</style>",
            f"<defs>{_ARROW_HEAD}</defs>",
            paper,
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
