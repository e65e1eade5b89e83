"""`moe-serve launch`: serves with attention and expert ranks on many nodes, by the same command on
each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import typer

from moe_serve.cli.launch.launch_emit import emit
from moe_serve.cli.launch.launch_options import LaunchOptions
from moe_serve.cli.launch.launch_request import LaunchRequest, launch_request
from moe_serve.cli.options import with_options
from moe_serve.cli.serve.first_log import begin_log
from moe_serve.cluster.control.secret import new_secret, read_secret
from moe_serve.cluster.launch.environment import DEFAULT_PORT
from moe_serve.cluster.launch.host_commands import run_on_hosts
from moe_serve.cluster.launch.host_port import HostPort
from moe_serve.cluster.launch.hosts import check_slots, read_hostfile
from moe_serve.cluster.launch.launchers import deepspeed_command, run_deepspeed, ssh_commands
from moe_serve.errors import ConfigError


@with_options(LaunchOptions)
def launch(options: LaunchOptions) -> None:
    """Serve a model on several nodes: run the same command on each node.

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


def run_from_here(request: LaunchRequest, environ: Mapping[str, str]) -> int:
    """Starts the same command on every host of the hostfile, and returns the exit code of the first
    that fails. Raises ConfigError before anything starts."""
    assert request.hostfile is not None, "run_from_here needs a hostfile"
    hosts = read_hostfile(request.hostfile)
    if request.node.node_rank is not None or request.node.num_nodes not in (None, len(hosts)):
        raise ConfigError(
            f"--hostfile names {len(hosts)} hosts and numbers them itself: leave --node-rank and "
            "--num-nodes out."
        )
    loaded = request.load(environ)
    layout = request.layout(loaded, len(hosts))
    if layout.num_nodes != len(hosts):
        raise ConfigError(f"the cluster file has {layout.num_nodes} nodes, not {len(hosts)}.")
    check_slots(hosts, [len(ranks) for ranks in layout.nodes])
    at = request.node.coordinator or HostPort(hosts[0].address, DEFAULT_PORT)
    if request.launcher == "deepspeed":
        return run_deepspeed(deepspeed_command(request.hostfile, request.command, at))
    commands = ssh_commands(
        hosts,
        request.command,
        at,
        read_secret(environ) or new_secret(),
        environ=environ,
        python=sys.executable,
        folder=os.getcwd(),
    )
    return run_on_hosts(commands)
