"""The experts' part of `moe-serve top`: a heat strip for each layer, and the hottest experts."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from moe_serve.cli.client.server_answer import Answer
from moe_serve.cli.top.heat_strip import heat_strip

_NUM_HOTTEST = 6
_JUSTIFIED: tuple[JustifyMethod, ...] = ("right", "left", "right", "right")
_SIDE = 34  # columns beside a strip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    layer: int  # its number in the model
    rows: tuple[float, ...]  # of each expert
    activated: float | None  # experts that a step reads

    @property
    def unevenness(self) -> float:
        """The load of the busiest expert over the mean."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 0.0


def layer_loads(experts: Answer) -> list[LayerLoad]:
    activated, layers = experts.numbers("activated_mean"), experts.numbers("layers")
    found = []
    for i, rows in enumerate(experts.at("load").items):
        numbers = tuple(rows.numbers())
        if numbers:
            mean = activated[i] if i < len(activated) else None
            layer = int(layers[i]) if i < len(layers) else i
            found.append(LayerLoad(layer=layer, rows=numbers, activated=mean))
    return found


def experts_table(experts: Answer, width: int, height: int) -> RenderableType:
    """Returns at most `height` lines. If not all layers fit, the most even ones are left out."""
    loads = layer_loads(experts)
    if not any(sum(load.rows) for load in loads):
        seconds = experts.number("window_s") or 0
        return Text(f"no rows went to experts in the last {seconds:.0f} s", style="dim")
    shown = sorted(loads, key=lambda load: -load.unevenness)[: max(1, height - 2)]
    table = Table.grid(padding=(0, 1))
    for justify in _JUSTIFIED:
        table.add_column(justify=justify, no_wrap=True)
    table.add_row("layer", "experts, from 0", "max/mean", "activated", style="dim")
    for load in sorted(shown, key=lambda load: load.layer):
        activated = "" if load.activated is None else f"{load.activated:.1f} of {len(load.rows)}"
        strip = heat_strip(load.rows, max(8, width - _SIDE))
        table.add_row(str(load.layer), strip, f"{load.unevenness:.2f}", activated)
    left_out = len(loads) - len(shown)
    more = f"  ({left_out} more even layers are not shown)" if left_out else ""
    hottest = Text(hottest_line(loads) + more, style="bold", no_wrap=True, overflow="ellipsis")
    return Group(table, hottest)


def hottest_line(loads: list[LayerLoad]) -> str:
    """Returns text like "hottest: 5/17 12%  0/3 9%": layer/expert, and its share of the layer's
    rows."""
    shares = [
        (rows / total, load.layer, expert)
        for load in loads
        if (total := sum(load.rows))
        for expert, rows in enumerate(load.rows)
    ]
    best = sorted(shares, key=lambda item: (-item[0], item[1], item[2]))[:_NUM_HOTTEST]
    return "hottest: " + "  ".join(f"{layer}/{e} {share:.0%}" for share, layer, e in best)
