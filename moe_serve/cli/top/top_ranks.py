"""The ranks' part of `moe-serve top`: the work of each rank, the placement and the predictor."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from moe_serve.cli.client.server_answer import Answer
from moe_serve.cli.top.heat_strip import bar

_WIDTH = 16


def ranks_table(ranks: Sequence[Answer]) -> Table:
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


def placement_lines(state: Answer) -> list[Text]:
    """Returns one line each for the placement and the predictor, if the server has them."""
    lines = []
    placement, predictor = state.at("placement"), state.at("predictor")
    if placement.is_there:
        parts = [f"version {_plain(placement.number('version'))}"]
        balance, age = placement.number("balance"), placement.number("age_s")
        parts += [] if balance is None else [f"mean/max load {balance:.2f}"]
        parts += [f"{_plain(placement.number('num_replicas'))} replicas"]
        parts += [] if age is None else [f"{age:.0f} s old"]
        parts += [placement.text("last_move") or ""]
        lines.append(_line("placement", parts))
    if predictor.is_there:
        recall, floor = predictor.number("recall"), predictor.number("floor")
        parts = [predictor.text("kind") or ""]
        parts += ["recall not measured yet"] if recall is None else [f"recall {recall:.2f}"]
        parts += [] if floor is None else [f"floor {floor:.2f}"]
        is_acting = predictor.at("is_acting").content
        parts += [] if is_acting is None else ["followed" if is_acting else "not followed"]
        lines.append(_line("predictor", parts))
    return lines


def _line(name: str, parts: Sequence[str]) -> Text:
    text = Text.assemble((f"{name:<10}", "dim"), "  ".join(part for part in parts if part))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _share(value: float | None) -> Text:
    return Text("?", style="dim") if value is None else Text(f"{bar(value, _WIDTH)} {value:4.0%}")


def _plain(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"
