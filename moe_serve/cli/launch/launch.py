"""`moe-serve launch`: serves with attention and expert ranks on many nodes, by the same command on
each."""

from __future__ import annotations

import os

import typer

from moe_serve.cli.launch.launch_emit import emit
from moe_serve.cli.launch.launch_hosts import run_from_here
from moe_serve.cli.launch.launch_options import LaunchOptions
from moe_serve.cli.launch.launch_request import launch_request
from moe_serve.cli.options import with_options
from moe_serve.cli.serve.first_log import begin_log


@with_options(LaunchOptions)
def launch(options: LaunchOptions) -> None:
    """Serve a model on many nodes: run the same command on each.

    Node 0 serves HTTP and coordinates. The other nodes start the ranks that node 0 asks for.
    """
    run = options.run
    log = {} if run.log_format is None else {"log.format": run.log_format}
    begin_log(log, os.environ, run.config_file)
    request = launch_request(options)
    if request.emit_kind is not None:
        emit(request, os.environ)
    elif request.hostfile is not None:
        raise typer.Exit(run_from_here(request, os.environ))
    else:
        # Imported late, as it is slow: `--help` and typing errors must answer at once.
        from moe_serve.cli.launch.launch_node import run_node

        run_node(request, os.environ, has_to_print=run.print_config)
