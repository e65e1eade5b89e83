"""The tables of `moe-serve top`: a heat strip for each layer, the hottest experts, the work of each
rank, the placement and the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from moe_serve.cli.top.top_source import StateView

BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("grey50", "deep_sky_blue3", "green3", "yellow3", "dark_orange", "red1")
_WIDEST = 3  # columns of one value
_HOT = 3.0  # times the mean: as hot as it is shown


def heat_strip(values: Sequence[float], width: int) -> Text:
    """Returns one to three characters for each value, or one for the largest of several values if
    there is no room.

    The height is the value's share of the largest, the colour its ratio to the mean.
    """
    cells = folded(values, width)
    mean = sum(values) / len(values) if values else 0.0
    num_columns = max(1, min(_WIDEST, width // max(1, len(cells))))
    strip = Text(no_wrap=True)
    for value in cells:
        strip.append(block(value, max(cells)) * num_columns, style=_colour(value, mean))
    return strip


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws the last `width` values, scaled to the largest of them."""
    shown = values[-width:]
    return "".join(block(value, max(shown)) for value in shown)


def bar(share: float, width: int) -> str:
    """Draws a share of 0 to 1 as a bar."""
    num_full = round(max(0.0, min(1.0, share)) * width)
    return "█" * num_full + "░" * (width - num_full)


def block(value: float, top: float) -> str:
    """Returns a block character; it is empty only for 0."""
    if value <= 0 or top <= 0:
        return BLOCKS[0]
    return BLOCKS[max(1, round(min(1.0, value / top) * (len(BLOCKS) - 1)))]


def folded(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` values, each the largest of its run.

    5 values in 3:  [0 1] [2 3] [4]
    """
    if len(values) <= width:
        return list(values)
    run = -(-len(values) // width)
    return [max(values[i : i + run]) for i in range(0, len(values), run)]


def _colour(value: float, mean: float) -> str:
    heat = value / mean / _HOT if mean > 0 else 0.0
    return _COLOURS[min(len(_COLOURS) - 1, int(heat * len(_COLOURS)))]


_NUM_HOTTEST = 6
_JUSTIFIED: tuple[JustifyMethod, ...] = ("right", "left", "right", "right")
_SIDE = 34  # columns beside a strip
_WIDTH = 16  # of a bar


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


def layer_loads(experts: StateView) -> list[LayerLoad]:
    activated, layers = experts.numbers("activated_mean"), experts.numbers("layers")
    found = []
    for i, rows in enumerate(experts.at("load").items):
        numbers = tuple(rows.numbers())
        if numbers:
            mean = activated[i] if i < len(activated) else None
            layer = int(layers[i]) if i < len(layers) else i
            found.append(LayerLoad(layer=layer, rows=numbers, activated=mean))
    return found


def experts_table(experts: StateView, width: int, height: int) -> RenderableType:
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


def ranks_table(ranks: Sequence[StateView]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("rank", "phase", "share of rows", "busy", "restarts", style="dim")
    for rank in ranks:
        phase = rank.text("phase") or "?"
        restarts = rank.number("restarts") or 0
        table.add_row(
            Text(rank.text("name") or "?", style="bold"),
            Text(phase, style="green" if phase == "serving" else "yellow"),
            _share(rank.number("load")),
            _share(rank.number("busy")),
            Text(f"{restarts:.0f}", style="red" if restarts else "dim"),
        )
    return table


def cells_table(cells: Sequence[StateView]) -> Table:
    """Returns one line for each cell: its ranks, its role and its work."""
    table = Table.grid(padding=(0, 2))
    heads = ("cell", "ranks", "role", "state", "running", "waiting", "KV pages")
    table.add_row(*heads, style="dim")
    for cell in cells:
        outage_s = cell.number("outage_s") or 0.0
        told = cell.text("state") or "?"
        style = {"serving": "green", "failed": "red"}.get(told, "yellow")
        state = Text(told, style=style)
        if outage_s > 0:
            state = Text(f"away for {outage_s:.0f} s", style="red")
        table.add_row(
            Text(cell.text("name") or "?", style="bold"),
            cell.text("ranks") or "?",
            cell.text("role") or "?",
            state,
            _plain(cell.number("running")),
            _plain(cell.number("waiting")),
            _share(cell.number("kv_used")),
        )
    return table


def tiers_table(service: StateView) -> Table:
    """Returns one line for each service tier: its targets, and what became of its requests."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left", *("right",) * 7):
        table.add_column(justify=justify, no_wrap=True)
    heads = ("tier", "targets", "ended", "kept all targets", "TTFT", "TPOT", "E2E", "late by")
    table.add_row(*heads, "refused", "expired", "broken", style="dim")
    for tier in service.at("tiers").items:
        late = tier.number("mean_tardiness_s")
        counts = [tier.number(f"{name}_total") for name in ("refused", "expired", "broken")]
        table.add_row(
            Text(tier.text("name") or "?", style="bold"),
            _targets(tier),
            _plain(tier.number("finished")),
            _share(tier.number("good")),
            *(_percent(tier.number("attained", name)) for name in ("ttft", "tpot", "e2e")),
            "-" if late is None else f"{late:.2f} s",
            *(Text(_plain(each), style="red" if each else "dim") for each in counts),
        )
    return table


def tenants_line(service: StateView) -> Text | None:
    """Returns the shares of the tenants with the most service; None if there are none."""
    tenants = service.at("tenants").items
    if not tenants:
        return None
    parts = [f"{each.text('name')} {_percent(each.number('share'))}" for each in tenants]
    jain = service.number("jain_index")
    end = [] if jain is None else [f"evenness {jain:.2f}"]
    return _line("tenants", [*parts, *end])


def _targets(tier: StateView) -> str:
    found = ((name, tier.number("targets", name)) for name in ("ttft", "tpot", "e2e"))
    return " ".join(f"{name} {seconds:g} s" for name, seconds in found if seconds is not None)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def placement_lines(state: StateView) -> list[Text]:
    """Returns one line each for the placement, or that of each cell, and for the predictor, if the
    server has them."""
    lines = []
    placement, predictor = state.at("placement"), state.at("predictor")
    if placement.is_there:
        lines.append(_line("placement", _placement_parts(placement)))
    for each in state.at("cell_placements").items:
        lines.append(_line("placement", [each.text("cell") or "", *_placement_parts(each)]))
    if predictor.is_there:
        recall, floor = predictor.number("recall"), predictor.number("floor")
        parts = [predictor.text("kind") or ""]
        parts += ["recall not measured yet"] if recall is None else [f"recall {recall:.2f}"]
        parts += [] if floor is None else [f"floor {floor:.2f}"]
        is_acting = predictor.at("is_acting").content
        parts += [] if is_acting is None else ["followed" if is_acting else "not followed"]
        lines.append(_line("predictor", parts))
    return lines


def _placement_parts(placement: StateView) -> list[str]:
    parts = [f"version {_plain(placement.number('version'))}"]
    balance, age = placement.number("balance"), placement.number("age_s")
    parts += [] if balance is None else [f"mean/max load {balance:.2f}"]
    parts += [f"{_plain(placement.number('num_replicas'))} replicas"]
    parts += [] if age is None else [f"{age:.0f} s old"]
    return [*parts, placement.text("last_move") or ""]


def _line(name: str, parts: Sequence[str]) -> Text:
    text = Text.assemble((f"{name:<10}", "dim"), "  ".join(part for part in parts if part))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _share(value: float | None) -> Text:
    return Text("?", style="dim") if value is None else Text(f"{bar(value, _WIDTH)} {value:4.0%}")


def _plain(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"
