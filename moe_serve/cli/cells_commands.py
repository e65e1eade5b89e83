"""`moe-serve cells`: lists, adds, removes and drains the cells of a running server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table

from moe_serve.cli.console import wide_console
from moe_serve.cli.server_client import URL, AdminClient, AdminKey, Url
from moe_serve.errors import CellsError

_FIELDS = frozenset({"cells"})
_POLL_S = 0.5
_COLUMNS = ("name", "state", "ranks", "role", "running", "waiting")

cells = typer.Typer(no_args_is_help=True)
Number = Annotated[int, typer.Argument(help="Number of the cell.", min=0)]
What = Annotated[
    str, typer.Argument(help="Number of a cell, or a rank such as cell-1/attention-0.")
]
Wait = Annotated[
    bool,
    typer.Option(help=("Wait until the cell serves or has left, or until the change has failed.")),
]


@cells.command(name="list")
def list_cells(url: Url = URL, admin_key: AdminKey = None) -> None:
    "Show the cells with their states and their work."
    _print(_client(url, admin_key).ask("GET", "cells", _FIELDS))


@cells.command()
def add(
    shape: Annotated[str, typer.Argument(help="One cell, such as '1A1E decode'.")],
    url: Url = URL,
    admin_key: AdminKey = None,
    wait: Wait = True,
    by_hand: Annotated[
        bool,
        typer.Option(
            "--by-hand",
            help=(
                "Print the commands that start the ranks, and let the server wait until you have "
                "run them."
            ),
        ),
    ] = False,
    node: Annotated[
        str | None,
        typer.Option(
            help=(
                "Node of the launch on which the cell's ranks run. Default: any node with free "
                "places."
            )
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            help=(
                "Number of the new cell. Repeating the command with the same number does not add a "
                "second cell."
            ),
            min=0,
        ),
    ] = None,
) -> None:
    "Start the ranks of one more cell beside the others. The cell serves when they have loaded."
    client = _client(url, admin_key)
    body = {"shape": shape, "number": number, "by_hand": by_hand, "node": node}
    found = client.ask("POST", "cells", _FIELDS | {"cell"}, body)
    name, shown = str(found["cell"]["name"]), False
    while True:
        cell = _cell(found, name)
        if by_hand and not shown and cell.get("commands"):
            shown = True
            typer.echo(f"{name}: {cell['note']}. On their hosts, with the cluster's secret, run")
            typer.echo("\n".join(f"    {command}" for command in cell["commands"]))
        is_told = shown or not by_hand or cell["state"] != "starting"
        if cell["state"] == "failed":
            raise CellsError(f"{name} could not start: {cell['note']}")
        if cell["state"] != "starting" or (not wait and is_told):
            break
        time.sleep(_POLL_S)
        found = client.ask("GET", "cells", _FIELDS)
    _print(found)
    if wait and cell["state"] == "gone":
        raise CellsError(f"{name} does not start: it was removed meanwhile.")


@cells.command()
def remove(number: Number, url: Url = URL, admin_key: AdminKey = None, wait: Wait = True) -> None:
    """Move the requests of a cell away, then end its ranks. Until its last request has left,
    `undrain` cancels the removal.
    """
    client = _client(url, admin_key)
    found = client.ask("DELETE", f"cells/{number}", _FIELDS | {"cell"})
    name = str(found["cell"]["name"])
    while wait and _cell(found, name)["state"] in ("starting", "leaving", "stopping"):
        time.sleep(_POLL_S)
        found = client.ask("GET", "cells", _FIELDS)
    _print(found)
    if wait and (state := _cell(found, name)["state"]) != "gone":
        raise CellsError(f"{name} is {state}: its removal was cancelled.")


@cells.command()
def drain(what: What, url: Url = URL, admin_key: AdminKey = None) -> None:
    "Send no more requests to a cell or a rank, and move its running ones away."
    _print(_client(url, admin_key).ask("POST", f"{_path(what)}/drain", _FIELDS))


@cells.command()
def undrain(what: What, url: Url = URL, admin_key: AdminKey = None) -> None:
    "Let a cell or a rank take requests again. This also cancels the removal of a cell."
    _print(_client(url, admin_key).ask("POST", f"{_path(what)}/undrain", _FIELDS))


def _path(what: str) -> str:
    if what.isascii() and what.isdecimal():
        return f"cells/{what}"
    if "/" in what:
        return f"ranks/{quote(what)}"
    raise CellsError(
        f"{what!r} is neither the number of a cell, such as 1, nor a rank, such as "
        "cell-1/attention-0."
    )


def _cell(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    gone = {"name": name, "state": "gone"}
    return next((cell for cell in found["cells"] if cell["name"] == name), gone)


def _client(url: str, key: str | None) -> AdminClient:
    return AdminClient(url=url, key=key, error=CellsError)


def _print(found: Mapping[str, Any]) -> None:
    nodes = found.get("nodes", ())
    more = ("KV pages", "nodes") if nodes else ("KV pages",)
    table = Table.grid(padding=(0, 2))
    table.add_row(*_COLUMNS, *more, "", style="dim")
    for cell in found["cells"]:
        drained = ", ".join(f"{rank} drains" for rank in cell["draining_ranks"])
        away = f"cannot compute for {cell['outage_s']:g} s" if cell.get("outage_s") else ""
        rest = "; ".join(part for part in (drained, away, str(cell["note"])) if part)
        values = [str(cell[column]) for column in _COLUMNS]
        values.append(f"{cell['kv_used']:.0%}")
        if nodes:
            values.append(", ".join(cell.get("nodes", ())))
        table.add_row(*values, rest)
    wide_console().print(table)
    for node in nodes:
        places = "" if node["num_places"] is None else f" of {node['num_places']}"
        away = "" if node["is_there"] else ", and is away"
        typer.echo(f"node {node['name']} has {node['num_ranks']}{places} ranks{away}")
    if (scaling := found.get("autoscale")) is not None:
        wanted = ", ".join(f"{count} {role}" for role, count in scaling["wanted"].items())
        last = f"; last: {scaling['last']}" if scaling["last"] else ""
        typer.echo(f"autoscaling by {scaling['policy']} wants {wanted or 'no change'}{last}")
