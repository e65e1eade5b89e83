"""`moe-serve trace`: records, shows and imports which experts the routers choose."""

from __future__ import annotations

import typer

from moe_serve.cli.trace.trace_import import import_
from moe_serve.cli.trace.trace_record import record
from moe_serve.cli.trace.trace_server import start, status, stop
from moe_serve.cli.trace.trace_show import show

trace = typer.Typer(no_args_is_help=True)
trace.command()(record)
trace.command()(show)
trace.command(name="import")(import_)
trace.command()(start)
trace.command()(stop)
trace.command()(status)
