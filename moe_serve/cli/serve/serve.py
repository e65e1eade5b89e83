"""`moe-serve serve`: loads a model and answers over HTTP. `launch` starts with the same checks."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from moe_serve.cli.console import ending_at_interrupt
from moe_serve.cli.options import argument, option, settings, with_options
from moe_serve.cli.serve.adapter_options import AdapterOptions
from moe_serve.cli.serve.event_options import EventOptions
from moe_serve.cli.serve.rank_options import RankCounts, RankOptions
from moe_serve.cli.serve.server_options import (
    HTTP,
    BatchOptions,
    HttpOptions,
    ListenOptions,
    ModelOptions,
    RunOptions,
    flag_settings,
)
from moe_serve.config.logs import set_up_logs
from moe_serve.config.sections import LogConfig, ServerConfig
from moe_serve.config.sources import LoadedConfig, load_config, wants_json_log
from moe_serve.errors import ConfigError


def check_is_guarded(server: ServerConfig) -> None:
    """Raises ConfigError if other machines could reach the server without an API key."""
    if not (is_loopback(server.host) or server.has_api_keys or server.allow_open):
        raise ConfigError(
            f"server.host {server.host} is open to other machines, but no API key is set: "
            "add --api-key KEY (or @FILE), or listen on 127.0.0.1, or set server.allow_open "
            "(MOE_SERVE_SERVER_ALLOW_OPEN=true) to serve without a key."
        )


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`. A name other than localhost is not
    trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_can_listen(server: ServerConfig) -> None:
    """Binds the address once and releases it, so that a taken port is reported before the model is
    loaded."""
    where = f"{server.host} port {server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"server.host {server.host} is not an address: {error.strerror}."
        ) from error
    except UnicodeError as error:  # an empty label, as in 127..0.1, or one that is too long
        raise ConfigError(f"server.host {server.host} is not an address or a host name.") from error
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "another program listens there; stop it, or choose --port",
            errno.EADDRNOTAVAIL: "this machine does not have that address; choose --host",
            errno.EACCES: "ports below 1024 need privileges; choose --port",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise ConfigError(f"cannot listen on {where}: {reason}.") from error


def begin_log(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> None:
    """Starts a JSON log, so that a refused configuration is logged as an object too. A text log
    needs no setup for that."""
    if wants_json_log(flags=flags, environ=environ, file=file):
        set_up_logs(LogConfig(format="json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `serve`."""

    model: str | None = argument(
        None,
        key="model.path",
        help="Folder of a checkpoint in Hugging Face layout, or the name of a model on a hub: "
        "OWNER/NAME or OWNER/NAME@REVISION. Default: the demonstration model.",
    )
    compute: ModelOptions
    adapters: AdapterOptions
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
    events: EventOptions
    run: RunOptions


@with_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    Settings come from flags, from environment variables such as MOE_SERVE_SERVER_PORT=8001 and from
    the YAML file given with --config. Flags override environment variables, and environment
    variables override the file.
    """
    run, flags = options.run, flag_settings(settings(options))
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
    with ending_at_interrupt():
        from moe_serve.cli.serve.service import run_service

    run_service(loaded.config, settings=loaded.entries)
