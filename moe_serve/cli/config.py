"""`moe-serve config`: shows the configuration of a server and the source of each value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.config.sources import DEFAULT_SOURCE, LoadedConfig, load_config

config = typer.Typer(no_args_is_help=True)


@config.callback()
def _group() -> None:
    """Show the configuration that a server would start with."""


@config.command()
def show(
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config", help="YAML file with the configuration; configs/serve.yaml lists every key."
        ),
    ] = None,
    changed: Annotated[
        bool,
        typer.Option("--changed", help="Print only keys whose value differs from the default."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, for scripts.")
    ] = False,
) -> None:
    """Print every configuration key with its value and its source.

    API keys are never printed; the output shows how many there are.
    """
    loaded = load_config(flags={}, environ=os.environ, file=config_file)
    entries = tuple(
        entry for entry in loaded.entries if not changed or entry.source != DEFAULT_SOURCE
    )
    if as_json:
        document = {
            entry.key.path: {
                "value": entry.shown if entry.key.is_secret else entry.key.plain(entry.value),
                "source": entry.source,
            }
            for entry in entries
        }
        typer.echo(json.dumps(document, indent=2))
    elif entries:
        typer.echo(LoadedConfig(config=loaded.config, entries=entries).to_yaml(), nl=False)
    else:
        typer.echo("# every key has its default")
