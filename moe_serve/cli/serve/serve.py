"""`moe-serve serve`: loads a model and answers over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass

import typer

from moe_serve.cli.options import argument, option, settings, with_options
from moe_serve.cli.serve.first_log import begin_log
from moe_serve.cli.serve.listening import check_can_listen, check_is_guarded
from moe_serve.cli.serve.server_options import (
    HTTP,
    BatchOptions,
    HttpOptions,
    ListenOptions,
    ModelOptions,
    RankCounts,
    RankOptions,
    RunOptions,
    number_settings,
)
from moe_serve.config.sources import LoadedConfig, load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `serve`."""

    model: str | None = argument(
        None,
        key="model.path",
        help="Folder of a checkpoint in Hugging Face layout. Default: the demonstration model.",
    )
    compute: ModelOptions
    batches: BatchOptions
    counts: RankCounts
    ranks: RankOptions
    listen: ListenOptions
    api_key: list[str] | None = option(
        None,
        key="server.api_keys",
        help="API key that clients must send, or @FILE with one key per line. May be given"
        " more than once. Default: no key is required.",
        rich_help_panel=HTTP,
    )
    http: HttpOptions
    run: RunOptions


@with_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Settings come from flags, from environment variables such as MOE_SERVE_SERVER_PORT=8001 and from
    the YAML file given with --config. Flags override environment variables, and environment
    variables override the file.
    """
    run, flags = options.run, number_settings(settings(options))
    begin_log(flags, os.environ, run.config_file)
    loaded = load_config(flags=flags, environ=os.environ, file=run.config_file)
    _run(loaded, has_to_print=run.print_config)


def _run(loaded: LoadedConfig, *, has_to_print: bool) -> None:
    if has_to_print:
        typer.echo(loaded.to_yaml(), nl=False)
        return
    check_is_guarded(loaded.config.server)
    check_can_listen(loaded.config.server)

    # Imported late, as it is slow: `--help`, typing errors and a taken port must answer at once.
    from moe_serve.cli.serve.service import run_service

    run_service(loaded.config, settings=loaded.entries)
