"""Defines the commands of `moe-serve`, and turns errors into exit codes.

0 success, 1 the server was not reached or the output could not be written, 2 the command line or a
file is wrong, 3 (run-batch) some rows are errors, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from experts.placement.placement_error import PlacementError
from moe_serve import __version__
from moe_serve.cli.adapter_commands import adapters
from moe_serve.cli.bench.bench import bench
from moe_serve.cli.cache import cache
from moe_serve.cli.calibrate import calibrate
from moe_serve.cli.cells_commands import cells
from moe_serve.cli.chat import chat
from moe_serve.cli.config import config
from moe_serve.cli.console import OutputError, checked_output, open_missing_streams
from moe_serve.cli.doctor.doctor import doctor
from moe_serve.cli.launch.launch import launch
from moe_serve.cli.models.models import models
from moe_serve.cli.place.place import place
from moe_serve.cli.placement_commands import placement
from moe_serve.cli.plan import plan
from moe_serve.cli.predictor.predictor import predictor
from moe_serve.cli.quantize.quantize import quantize
from moe_serve.cli.run_batch.run_batch import run_batch
from moe_serve.cli.serve.foreign_flags import ServerCommand
from moe_serve.cli.serve.serve import serve
from moe_serve.cli.simulate import simulate
from moe_serve.cli.timeline import timeline
from moe_serve.cli.top.top import top
from moe_serve.cli.trace.trace_commands import trace
from moe_serve.config.logs import is_json_log
from moe_serve.errors import ClusterError, EngineDeadError, MoeServeError, printable
from routing_predictor.traces.routing_error import RoutingError

EXIT_FAILURE = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="moe-serve",
    help="An expert-parallel inference server for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel="Serve", cls=ServerCommand)(serve)
app.command(rich_help_panel="Serve", cls=ServerCommand)(launch)
app.command(rich_help_panel="Use")(chat)
app.command(name="run-batch", rich_help_panel="Use")(run_batch)
app.command(rich_help_panel="Use")(quantize)
app.add_typer(
    adapters,
    name="adapters",
    rich_help_panel="Use",
    help="Make adapters of fine-tunes, and merge them.",
)
app.add_typer(bench, name="bench", rich_help_panel="Use")
app.command(rich_help_panel="Inspect")(doctor)
app.add_typer(models, name="models", rich_help_panel="Inspect")
app.add_typer(
    config,
    name="config",
    rich_help_panel="Inspect",
    help="Show the configuration that a server would start with.",
)
app.add_typer(
    cache,
    name="cache",
    rich_help_panel="Inspect",
    help="Show, verify or clear the KV pages that a server keeps on a disk.",
)
app.command(rich_help_panel="Inspect")(timeline)
app.command(rich_help_panel="Inspect")(top)
app.add_typer(
    trace,
    name="trace",
    rich_help_panel="Plan",
    help="Record, show or import the experts that the routers choose.",
)
app.add_typer(
    placement,
    name="placement",
    rich_help_panel="Inspect",
    help="Show, apply, save or rebalance the expert placement of a running server.",
)
app.add_typer(
    cells,
    name="cells",
    rich_help_panel="Inspect",
    help="List, add, remove or drain the cells of a running server.",
)
app.command(rich_help_panel="Plan")(calibrate)
app.command(rich_help_panel="Plan")(plan)
app.command(rich_help_panel="Plan")(simulate)
app.add_typer(place, rich_help_panel="Plan")
app.add_typer(predictor, rich_help_panel="Plan")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"moe-serve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """An expert-parallel inference server for Mixture-of-Experts language models."""


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits. A mistake of the user is one line, never a traceback."""
    open_missing_streams()
    try:
        with checked_output():
            _commands()(args=arguments, prog_name="moe-serve")
    except (EngineDeadError, ClusterError, OutputError) as error:
        _say(error)
        sys.exit(EXIT_FAILURE)
    except (MoeServeError, RoutingError, PlacementError) as error:
        _say(error)
        sys.exit(EXIT_MISTAKE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


@functools.cache
def _commands() -> Callable[..., object]:
    """Builds all commands from their options, once for all calls in a process."""
    return typer.main.get_command(app)


def _say(error: Exception) -> None:
    if is_json_log():
        logging.getLogger("moe_serve").error("%s", error)
    else:
        with contextlib.suppress(OSError):  # a full standard error
            typer.echo(f"error: {printable(str(error))}", err=True)
