"""Draws one frame of `moe-serve top` from the answer of `/dashboard/state`, for a terminal's
size."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moe_serve.cli.top.top_source import StateView
from moe_serve.cli.top.top_tables import (
    bar,
    cells_table,
    experts_table,
    placement_lines,
    ranks_table,
    sparkline,
    tenants_line,
    tiers_table,
)

_NARROW = 130  # columns below which the figures are one column, not two
_MAX_EVENTS = 4
_MIN_EXPERT_LINES = 6  # else events and ranks are left out for them
_ALL = 10_000  # lines


def frame(
    state: StateView, console: Console, *, is_bounded: bool = True, trouble: str | None = None
) -> Group:
    """Draws a frame as wide as the console; with `is_bounded` also as high, and then some layers
    are left out.

    `trouble` says why the state is an old one.
    """
    figures = [_requests(state), _tokens(state), _latency(state), _cache(state)]
    grid = Table.grid(expand=True, padding=(0, 2))
    columns = 1 if console.width < _NARROW else 2
    for _ in range(columns):
        grid.add_column(ratio=1)
    for i in range(0, len(figures), columns):
        grid.add_row(*figures[i : i + columns])
    above: list[RenderableType] = [_title(state, trouble), _panel("load", grid)]
    below: list[RenderableType] = [*_tiers(state), *_ranks(state), *_events(state)]
    if state.at("experts").is_there:
        while is_bounded and below and _room(console, above, below) < _MIN_EXPERT_LINES:
            below.pop()
        height = _room(console, above, below) if is_bounded else _ALL
        table = experts_table(state.at("experts"), console.width - 4, height)
        below.insert(0, _panel(_experts_title(state), table))
    return Group(*above, *below)


def _room(console: Console, *parts: list[RenderableType]) -> int:
    """Returns the lines left for the inside of one more panel."""
    taken = [part for group in parts for part in group]
    return console.height - len(console.render_lines(Group(*taken))) - 2


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _title(state: StateView, trouble: str | None) -> Text:
    server = state.at("server")
    title = Text.assemble(("moe-serve", "bold"), f" {server.text('version') or ''}")
    is_ready = server.at("is_ready").content
    if trouble is not None:  # before the model, whose name may fill a narrow terminal
        title.append(f"  {trouble}", style="bold red")
    elif is_ready is False:
        title.append("  not ready", style="bold yellow")
    title.append(f"  {_model(server)}", style="bold cyan")
    if is_ready is True and trouble is None:
        title.append("  ready", style="green")
    for part in (server.text("layout"), _uptime(server.number("uptime_s"))):
        if part:
            title.append(f"  {part}")
    title.no_wrap, title.overflow = True, "ellipsis"
    return title


def _model(server: StateView) -> str:
    return server.text("model") or "?"


def _uptime(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600)
    return (
        f"up {hours} h {minutes:02d} min" if hours else f"up {minutes} min {seconds % 60:02.0f} s"
    )


def _requests(state: StateView) -> Text:
    requests = state.at("requests")
    running, most = requests.number("running"), requests.number("max_running")
    line = _label("requests")
    line.append(f"{_count(running)} running", style="bold")
    if running is not None and most:
        line.append(f" of {most:.0f} {bar(running / most, 10)}")
    line.append(f"  {_count(requests.number('waiting'))} waiting")
    oldest = requests.number("oldest_waiting_s")
    if oldest:
        line.append(f", oldest {oldest:.1f} s", style="yellow" if oldest > 5 else "")
    ends = [(name, requests.number(f"{name}_total")) for name in ("finished", "failed", "rejected")]
    line.append("\n" + " " * 9 + "  ".join(f"{_count(n)} {name}" for name, n in ends))
    return line


def _tokens(state: StateView) -> Text:
    line = _label("tokens")
    for index, (key, name) in enumerate((("generated", "generated"), ("prompt", "of prompts"))):
        line.append("" if index == 0 else "\n" + " " * 9)
        speeds = state.numbers("history", f"{key}_per_s")
        now = f"{speeds[-1]:7.0f}/s" if speeds else "      ?/s"
        line.append(now, style="bold" if index == 0 else "")
        line.append(f" {name}, {_count(state.number('tokens', f'{key}_total'))} in all ")
        if len(speeds) > 1:
            line.append(sparkline(speeds, 20), style="cyan")
    speculation = state.at("speculation")
    if speculation.is_there:
        line.append(f"\n{'':9}{_drafts(state, speculation)}")
    return line


def _drafts(state: StateView, speculation: StateView) -> str:
    """Returns the acceptance since the start, and the tokens that a sequence gets from one step."""
    lately = state.numbers("history", "tokens_per_step")
    now = lately[-1] if lately else speculation.number("tokens_per_step")
    acceptance = speculation.number("acceptance")
    shown = "" if acceptance is None else f", {acceptance:.0%} accepted"
    per_step = "?" if now is None else f"{now:.2f}"
    return f"{per_step} per step, {_count(speculation.number('drafted_total'))} drafted{shown}"


def _latency(state: StateView) -> Text:
    line = _label("latency")
    for index, (key, name) in enumerate((("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))):
        line.append("" if index == 0 else "\n" + " " * 9)
        line.append(f"{name} ", style="bold")
        figures = state.at("latency", key)
        shown = [
            f"{what} {value:.1f} ms"
            for what in ("p50", "p90", "p99", "mean")
            if (value := figures.number(what)) is not None
        ]
        line.append("  ".join(shown) or "no request yet", style="" if shown else "dim")
    return line


def _cache(state: StateView) -> Text:
    line = _label("KV")
    kv = state.at("kv")
    for index, tier in enumerate(kv.at("tiers").items):
        line.append("" if index == 0 else "\n" + " " * 9)
        pages, used, cached = (tier.number(name) for name in ("pages", "used", "cached"))
        share = used / pages if used is not None and pages else tier.number("share")
        line.append(f"{tier.text('name') or 'pages'} ", style="bold")
        if pages == 0:  # they are those of the attention ranks
            line.append("no pages: no attention rank is there", style="red")
            continue
        if share is not None:
            line.append(f"{bar(share, 16)} {share:.0%}")
        if used is not None:
            line.append(f"  {_count(used)} of {_count(pages)} pages, {_count(cached)} cached")
    hit_rate = kv.number("prefix_hit_rate")
    if hit_rate is not None:
        line.append(f"\n{'':9}prefix hits {hit_rate:.0%}")
    window = kv.at("window")
    if window.is_there:
        what = (_count(window.number(name)) for name in ("requests", "dropped_pages"))
        line.append("\n{:9}kv_window: {} requests gave back {} pages".format("", *what))
    memory = state.at("expert_memory")
    if memory.is_there:
        gib = (memory.number("resident_bytes") or 0) / 2**30
        rate = memory.number("hit_rate")
        line.append(f"\n{'':9}experts in memory {gib:.2f} GiB")
        line.append("" if rate is None else f", hits {rate:.0%}")
    return line


def _experts_title(state: StateView) -> str:
    experts = state.at("experts")
    num_experts, top_k = experts.number("num_experts"), experts.number("top_k")
    return (
        f"experts: {_count(experts.number('num_layers'))} layers of {_count(num_experts)}, "
        f"top {_count(top_k)}; {_count(experts.number('num_tokens'))} tokens in "
        f"{_count(experts.number('window_s'))} s"
    )


def _tiers(state: StateView) -> list[Panel]:
    """Returns the panel of the service tiers; none if the server has no tiers."""
    service = state.at("service")
    if not service.at("tiers").items:
        return []
    tenants = tenants_line(service)
    content = Group(tiers_table(service), *([] if tenants is None else [tenants]))
    return [_panel(f"service tiers, order {service.text('order') or '?'}", content)]


def _ranks(state: StateView) -> list[Panel]:
    ranks, lines = state.at("ranks").items, placement_lines(state)
    cells = state.at("cells").items
    panels = [_panel("cells", cells_table(cells))] if cells else []
    if not ranks and not lines:
        return panels
    content = Group(*([ranks_table(ranks)] if ranks else []), *lines)
    return [*panels, _panel("ranks and placement", content)]


def _events(state: StateView) -> list[Panel]:
    events = state.at("events").items[-_MAX_EVENTS:]
    if not events:
        return []
    table = Table.grid(padding=(0, 1))
    for event in events:
        when = event.number("time")
        clock = "" if when is None else time.strftime("%H:%M:%S", time.localtime(when))
        text = Text(event.text("text") or "", no_wrap=True, overflow="ellipsis")
        table.add_row(Text(clock, style="dim"), Text(event.text("kind") or "", style="bold"), text)
    return [_panel("events", table)]


def _label(name: str) -> Text:
    return Text.assemble((f"{name:<9}", "dim"))


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}".replace(",", " ")
