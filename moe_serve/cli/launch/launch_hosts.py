"""`moe-serve launch --hostfile`: starts the same command on every host of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from moe_serve.cli.launch.launch_request import LaunchRequest
from moe_serve.cluster.control.secret import new_secret, read_secret
from moe_serve.cluster.launch.environment import DEFAULT_PORT
from moe_serve.cluster.launch.host_commands import run_on_hosts
from moe_serve.cluster.launch.host_port import HostPort
from moe_serve.cluster.launch.hosts import check_slots, read_hostfile
from moe_serve.cluster.launch.launchers import deepspeed_command, run_deepspeed, ssh_commands
from moe_serve.errors import ConfigError


def run_from_here(request: LaunchRequest, environ: Mapping[str, str]) -> int:
    """Runs the hosts and returns the exit code of the first that fails. Raises ConfigError before
    anything starts."""
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
