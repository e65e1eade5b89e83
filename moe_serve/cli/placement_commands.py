"""`moe-serve placement`: shows, saves and rebalances the expert placement of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moe_serve.cli.console import wide_console
from moe_serve.cli.server_client import URL, AdminClient, AdminKey, Url
from moe_serve.errors import RebalanceError

_CELLS = frozenset({"cells"})
_STATUS = frozenset({"mode", "state", "version", "balance", "last", "num_plans"})
_PLAN = frozenset({"format", "num_ranks", "layers"})
_POLL_S = 0.2

placement = typer.Typer(no_args_is_help=True)
Cell = Annotated[
    int | None,
    typer.Option(help="Number of the cell, if the server has several.", min=0, metavar="<int>"),
]


@placement.command()
def status(url: Url = URL, admin_key: AdminKey = None, cell: Cell = None) -> None:
    "Show the current placement, how balanced it is, and the result of the last plan."
    client = _client(url, admin_key)
    found = client.ask("GET", _path("placement", cell), _STATUS, or_fields=_CELLS)
    for each in found.get("cells", [found]):
        if each is not found:
            typer.echo(f"cell-{each['cell']}")
        _print(each)


@placement.command()
def rebalance(
    url: Url = URL,
    admin_key: AdminKey = None,
    cell: Cell = None,
    wait: Annotated[
        bool, typer.Option(help="Wait until the plan is rejected or the experts have moved.")
    ] = True,
) -> None:
    """Plan a new placement from recent loads now. Experts move only if the gain is large enough."""
    client = _client(url, admin_key)
    found = client.ask("POST", _path("placement/rebalance", cell), _STATUS)
    while wait and found["state"] != "idle":
        time.sleep(_POLL_S)
        found = client.ask("GET", _path("placement", cell), _STATUS)
    _print(found)


@placement.command()
def apply(
    file: Annotated[Path, typer.Argument(help="Plan written by `moe-serve place --out`.")],
    url: Url = URL,
    admin_key: AdminKey = None,
    cell: Cell = None,
    wait: Annotated[bool, typer.Option(help="Wait until the experts have moved.")] = True,
) -> None:
    """Put a plan into effect on a running server. The experts move while the server answers
    requests.
    """
    content = _read(file)
    client = _client(url, admin_key)
    found = client.ask("POST", _path("placement/plan", cell), _STATUS, content)
    while wait and found["state"] != "idle":
        time.sleep(_POLL_S)
        found = client.ask("GET", _path("placement", cell), _STATUS)
    _print(found)
    last = found["last"]
    if wait and (last is None or last["outcome"] not in ("moved", "nothing")):
        raise RebalanceError(
            f"{file} was not put into effect: "
            + ("the server does not say why." if last is None else last["text"])
        )


@placement.command()
def save(
    file: Annotated[
        Path, typer.Argument(help="JSON file to write; `moe-serve serve --placement` reads it.")
    ],
    url: Url = URL,
    admin_key: AdminKey = None,
    cell: Cell = None,
) -> None:
    "Write the current placement into a file, so that a server can start with it again."
    content = _client(url, admin_key).ask("GET", _path("placement/plan", cell), _PLAN)
    try:
        file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise RebalanceError(f"{file} cannot be written: {error.strerror}.") from None
    typer.echo(f"{file}: {len(content['layers'])} layers on {content['num_ranks']} expert ranks")


def _read(file: Path) -> Mapping[str, Any]:
    """Returns the JSON of a plan's file, after the checks that need no server."""
    from experts.placement.placement_error import PlacementError
    from experts.placement.plan_file import placement_text, read_placement

    try:
        content: Mapping[str, Any] = json.loads(placement_text(read_placement(file)))
    except PlacementError as error:
        raise RebalanceError(str(error)) from None
    return content


def _client(url: str, key: str | None) -> AdminClient:
    return AdminClient(url=url, key=key, error=RebalanceError)


def _path(path: str, cell: int | None) -> str:
    return path if cell is None else f"{path}?cell={cell}"


def _print(found: Mapping[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("rebalance", found["mode"])
    table.add_row("state", found["state"])
    table.add_row("placement", f"version {found['version']}, {found['age_s']:.0f} s old")
    figures = {name: value for name, value in found["balance"].items() if value is not None}
    shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    table.add_row("balancedness", shown or "not known yet")
    table.add_row("counted", f"{found['num_counted_tokens']} tokens since the last plan")
    table.add_row(
        "moved", f"{found['num_copies']} copies, {found['num_bytes'] / 2**20:.4g} MiB were read"
    )
    before, during = found["before_p99_s"], found["during_p99_s"]
    if before is not None and during is not None:
        table.add_row("p99 step", f"{1e3 * before:.1f} ms, {1e3 * during:.1f} ms during the move")
    plans = {name: count for name, count in found["num_plans"].items() if count}
    table.add_row("plans", ", ".join(f"{name} {count}" for name, count in plans.items()) or "none")
    if found["last"] is not None:
        table.add_row("the last", f"{found['last']['outcome']}: {found['last']['text']}")
    wide_console().print(table)
