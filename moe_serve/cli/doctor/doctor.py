"""`moe-serve doctor`: checks this machine and explains why each backend is on or off."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from moe_serve.cli.console import wide_console
from moe_serve.cli.doctor.doctor_checks import Check, CheckState, has_problem, machine_checks
from moe_serve.cli.doctor.machine import MachineReport, look_at_machine
from moe_serve.cli.doctor.machine_limits import Fact
from moe_serve.config.logs import set_up_logs
from moe_serve.config.sources import load_config

_STYLES: Mapping[CheckState, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose files and memory needs are checked too: the folder of a checkpoint, "
            "or the name of a model in the Hugging Face cache. Default: no model is checked."
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", help="YAML file with the configuration; configs/serve.yaml lists every key."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, for scripts.")
    ] = False,
) -> None:
    """Check this machine: hardware, which backends can be used and why, and problems with serving.

    The exit code is 1 if something that a server needs is missing.
    """
    flags = {} if model is None else {"model.path": model}
    config = load_config(flags=flags, environ=os.environ, file=config_file).config
    set_up_logs(config.log)  # building the kernels logs its progress
    report = look_at_machine(config.server.host, config.server.port)
    sections, checks = dict(report.sections), machine_checks(report)
    if model is not None and not has_problem(checks):
        # torch is there: that was one of the checks.
        from moe_serve.cli.doctor.model_check import check_model

        found = check_model(config.engine)
        sections["model"] = found.facts
        checks += found.checks
    if as_json:
        document = {
            **sections,
            "backends": [dataclasses.asdict(backend) for backend in report.backends],
            "checks": [dataclasses.asdict(check) for check in checks],
        }
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(sections, report, checks)
    if has_problem(checks):
        raise typer.Exit(1)


def _print(
    sections: Mapping[str, Mapping[str, Fact]], report: MachineReport, checks: Sequence[Check]
) -> None:
    console = wide_console()
    table = Table.grid(padding=(0, 2))
    for section, facts in sections.items():
        for name, value in facts.items():
            table.add_row(Text(section, style="bold"), _label(name), Text(_shown(name, value)))
    console.print(table)
    console.print()
    backends = Table.grid(padding=(0, 2))
    for backend in report.backends:
        state = Text("on", style="green") if backend.is_on else Text("off", style="yellow")
        backends.add_row(state, Text(backend.name, style="bold"), Text(backend.reason))
    console.print(backends)
    console.print()
    found = Table.grid(padding=(0, 2))
    for check in checks:
        found.add_row(
            Text(check.state, style=_STYLES[check.state]),
            Text(check.name, style="bold"),
            Text(check.text),
        )
    console.print(found)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _shown(name: str, value: Fact) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if name.endswith("_bytes"):
        assert isinstance(value, int), f"{name}: bytes are an int, got {value!r}"
        return f"{value / 2**30:.1f} GiB" if value >= 2**27 else f"{value / 2**20:.1f} MiB"
    return str(value)
