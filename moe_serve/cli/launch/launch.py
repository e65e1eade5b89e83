"""`moe-serve launch`: serves on many nodes by the same command on each, or writes start files."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import typer

from moe_serve.cli.console import ending_at_interrupt, refuse_a_file
from moe_serve.cli.launch.launch_options import (
    LaunchOptions,
    LaunchRequest,
    launch_request,
    wanted_ranks,
)
from moe_serve.cli.options import with_options
from moe_serve.cli.serve.rank_options import RankCounts, RankOptions
from moe_serve.cli.serve.serve import begin_log
from moe_serve.cluster.control.secret import new_secret, read_secret
from moe_serve.cluster.launch.deployment import Deployment, LaunchCommand
from moe_serve.cluster.launch.emit.kubernetes import kubernetes_files
from moe_serve.cluster.launch.emit.scripts import shell_files, slurm_files, systemd_files
from moe_serve.cluster.launch.environment import DEFAULT_PORT
from moe_serve.cluster.launch.hosts import HostPort, check_slots, parse_endpoint, read_hostfile
from moe_serve.cluster.launch.launchers import (
    deepspeed_command,
    run_deepspeed,
    run_on_hosts,
    ssh_commands,
)
from moe_serve.cluster.launch.node_agent import JoiningNode
from moe_serve.cluster.launch.node_layout import NodeLayout, share_out
from moe_serve.cluster.launch.node_places import objection_to_node
from moe_serve.cluster.members.rank_starter import num_accelerators
from moe_serve.config.keys import config_keys
from moe_serve.config.sections import ServerConfig
from moe_serve.config.sources import LoadedConfig, variable_name
from moe_serve.errors import ConfigError

_EVERYWHERE = "0.0.0.0"
_EXECUTABLE = (".sh", ".sbatch")


def emit(request: LaunchRequest, environ: Mapping[str, str]) -> None:
    """Prints the files, or writes them to --out and prints their names."""
    out = request.options.files.out
    if out is not None:
        refuse_a_file(out)
    files = emitted_files(request, request.load(environ))
    for name, text in files.items():
        if out is None:
            typer.echo(f"# ---- {name}\n{text}", nl=False)
        else:
            typer.echo(str(_write(out, name, text)))


def emitted_files(request: LaunchRequest, loaded: LoadedConfig) -> Mapping[str, str]:
    """Returns {file name: text}. Raises ConfigError."""
    num_nodes = request.node.num_nodes
    if num_nodes is None and request.cluster is not None:
        num_nodes = len(request.cluster.nodes)
    if num_nodes is None:
        raise ConfigError("give the number of nodes: --num-nodes or --cluster.")
    layout = request.layout(loaded, num_nodes)
    kind = request.options.files.emit_kind
    if kind in ("slurm", "kubernetes"):
        deployment = _placed_by_others(request, loaded, layout)
        if kind == "slurm":
            return slurm_files(deployment)
        return kubernetes_files(
            _for_pods(deployment, loaded), request.options.files.kubernetes_kind
        )
    deployment = _deployment(request, loaded, layout, request.command)
    return systemd_files(deployment) if kind == "systemd" else shell_files(deployment)


def _deployment(
    request: LaunchRequest, loaded: LoadedConfig, layout: NodeLayout, command: LaunchCommand
) -> Deployment:
    files, at = request.options.files, request.node.coordinator
    if at is None and request.cluster is not None:
        at = request.cluster.endpoint
    has_devices = bool(request.devices()) or loaded.config.engine.model.device == "cuda"
    return Deployment(
        name=files.name or ("moe-serve" if request.cluster is None else request.cluster.name),
        num_nodes=layout.num_nodes,
        command=command,
        coordinator=at,
        http_port=loaded.config.server.port,
        num_devices=max(len(ranks) for ranks in layout.nodes) if has_devices else 0,
        image=files.image,
        model_claim=files.model_claim,
        drain_timeout_s=loaded.config.server.drain_timeout_s,
        probe_scheme=_probe_scheme(loaded.config.server),
    )


def _probe_scheme(server: ServerConfig) -> Literal["HTTP", "HTTPS"] | None:
    if server.ssl_ca_certs is not None:
        return None
    return "HTTP" if server.ssl_certfile is None else "HTTPS"


def _placed_by_others(
    request: LaunchRequest, loaded: LoadedConfig, layout: NodeLayout
) -> Deployment:
    """Returns the deployment for a system that chooses the nodes itself.

    The names and addresses in a cluster file do not apply there: its settings become environment
    variables, and its layout must be the one that every node derives by itself.
    """
    counts = loaded.config.engine.cluster
    if layout != share_out(wanted_ranks(loaded), layout.num_nodes):
        raise ConfigError(
            f"{request.options.files.emit_kind} chooses the nodes itself and fills them evenly, "
            f"but {request.command.cluster_file} places ranks otherwise; leave --cluster out, "
            "and give --attention-ranks, --expert-ranks and --num-nodes."
        )
    command = replace(
        request.command,
        model=loaded.config.engine.model.path,
        attention_ranks=counts.attention_ranks or None,
        expert_ranks=counts.expert_ranks or None,
        cluster_file=None,
    )
    deployment = _deployment(request, loaded, layout, command)
    settings = {} if request.cluster is None else request.cluster.settings
    return replace(deployment, coordinator=None, variables=_variables(settings))


def _for_pods(deployment: Deployment, loaded: LoadedConfig) -> Deployment:
    """Adapts a deployment to pods, which are reached by address instead of loopback; the secret is
    a variable."""
    flags = deployment.command.serve_flags
    if loaded.config.server.host == "127.0.0.1":
        flags = (*flags, "--host", _EVERYWHERE)
    command = replace(deployment.command, serve_flags=flags, secret_file=None)
    return replace(deployment, command=command)


def _variables(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns settings as variables: {"server.port": 8001} becomes {"MOE_SERVE_SERVER_PORT":
    "8001"}."""
    keys = {key.path: key for key in config_keys()}
    return {variable_name(keys[path]): _text(value) for path, value in settings.items()}


def _text(value: object) -> str:
    if isinstance(value, list | dict):
        return json.dumps(
            value
        )  # If lists were joined with commas, an empty list would count as not set.
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        if path.suffix in _EXECUTABLE:
            path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
    return path


@with_options(LaunchOptions)
def launch(options: LaunchOptions) -> None:
    """Serve a model on several nodes: run the same command on each node.

    Node 0 serves HTTP and coordinates. The other nodes start the ranks that node 0 asks for.
    """
    run = options.run
    log = {} if run.log_format is None else {"log.format": run.log_format}
    begin_log(log, os.environ, run.config_file)
    if options.nodes.join is not None:
        node = _joining_node(options)
        # Imported late, as below.
        with ending_at_interrupt():
            from moe_serve.cli.launch.launch_node import join_launch

        join_launch(options, node, os.environ)
        return
    request = launch_request(options)
    if options.files.emit_kind is not None:
        emit(request, os.environ)
    elif options.start.hostfile is not None:
        raise typer.Exit(run_from_here(request, os.environ))
    else:
        # Imported late, as it is slow: `--help` and typing errors must answer at once.
        with ending_at_interrupt():
            from moe_serve.cli.launch.launch_node import run_node

        run_node(request, os.environ, has_to_print=run.print_config)


def run_from_here(request: LaunchRequest, environ: Mapping[str, str]) -> int:
    """Starts the same command on every host in the hostfile, and returns the exit code of the first
    host that fails. Raises ConfigError before anything starts.
    """
    hostfile = request.options.start.hostfile
    assert hostfile is not None, "run_from_here needs a hostfile"
    hosts = read_hostfile(hostfile)
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
    if request.options.start.launcher == "deepspeed":
        return run_deepspeed(deepspeed_command(hostfile, request.command, at))
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


def _joining_node(options: LaunchOptions) -> JoiningNode:
    """Returns the node that the options add to a running launch. Raises ConfigError."""
    _check_joining(options)
    nodes = options.nodes
    name = socket.gethostname() if nodes.node is None else nodes.node
    num_places = nodes.places or num_accelerators() or _num_cores()
    if (why := objection_to_node(name, num_places)) is not None:
        raise ConfigError(f"{why}; see --node NAME and --places N.")
    return JoiningNode(
        name=name,
        num_places=num_places,
        coordinator=parse_endpoint(nodes.join or "", "--join"),
        agent=secrets.token_hex(8),
    )


def _num_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _check_joining(options: LaunchOptions) -> None:
    nodes, start, files = options.nodes, options.start, options.files
    others = {
        "--node-rank": nodes.node_rank,
        "--num-nodes": nodes.num_nodes,
        "--coordinator": nodes.coordinator,
        "--cluster": nodes.cluster,
        "--hostfile": start.hostfile,
        "--emit": files.emit_kind,
    }
    given = [name for name, value in others.items() if value is not None]
    if options.counts != RankCounts() or options.ranks != RankOptions():
        given.append("the number of ranks or cells")
    if given:
        raise ConfigError(
            f"--join adds this node to a running launch, which has these settings already: leave "
            f"out {', '.join(given)}."
        )
