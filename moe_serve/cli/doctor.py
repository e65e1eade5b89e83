"""`moe-serve doctor`: what this machine has, and why each backend is on or off."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_serve.cli.machine import Fact, MachineReport, look_at_machine


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Say what this machine has, and why each backend is on or off."""
    report = look_at_machine()
    if as_json:
        document = {
            **report.sections,
            "backends": [dataclasses.asdict(backend) for backend in report.backends],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(report)


def _print(report: MachineReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    for section, facts in report.sections.items():
        for name, value in facts.items():
            table.add_row(Text(section, style="bold"), _label(name), Text(_shown(name, value)))
    console.print(table)
    console.print()
    backends = Table.grid(padding=(0, 2))
    for backend in report.backends:
        state = Text("on", style="green") if backend.is_on else Text("off", style="yellow")
        backends.add_row(state, Text(backend.name, style="bold"), Text(backend.reason))
    console.print(backends)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _shown(name: str, value: Fact) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if name.endswith("_bytes"):
        assert isinstance(value, int), f"{name}: bytes are an int, got {value!r}"
        return f"{value / 2**30:.1f} GiB"
    return str(value)
