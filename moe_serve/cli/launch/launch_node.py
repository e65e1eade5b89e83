"""Runs one node of a launch: node 0 serves and coordinates, the others run an agent, and so does a
node that joins later.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

import psutil
import typer

from moe_serve.cli.console import optional_output
from moe_serve.cli.launch.launch_options import LaunchOptions, LaunchRequest
from moe_serve.cli.options import settings
from moe_serve.cli.serve.serve import check_can_listen, check_is_guarded
from moe_serve.cli.serve.server_options import flag_settings
from moe_serve.cli.serve.service import BuildEngine, run_service
from moe_serve.cluster.cell_start import NewCell, StarterOfCell
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.control.secret import ClusterSecret, new_secret, read_secret
from moe_serve.cluster.launch.cell_nodes import CellNodes
from moe_serve.cluster.launch.cluster_file import find_node
from moe_serve.cluster.launch.environment import NodeEnvironment, detect_node, is_spare_copy
from moe_serve.cluster.launch.hosts import HostPort, own_address
from moe_serve.cluster.launch.node_agent import (
    AgentMessage,
    JoiningNode,
    NodeLife,
    connect_agent,
    connect_joining,
)
from moe_serve.cluster.launch.node_layout import NodeLayout
from moe_serve.cluster.launch.node_ranks import NodeRanks
from moe_serve.cluster.launch.node_starter import NodeStarter
from moe_serve.cluster.members.rank_starter import RankStarter
from moe_serve.cluster.started_cells import build_cells
from moe_serve.cluster.started_ranks import MakeStarter, build_cluster
from moe_serve.config.cell_config import cell_shapes
from moe_serve.config.logs import is_json_log, set_up_logs
from moe_serve.config.sections import Config, EngineConfig
from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE, LoadedConfig, load_config
from moe_serve.engine.build import BuiltEngine
from moe_serve.errors import ConfigError
from moe_serve.model.hub.named_model import local_model
from moe_serve.model.load.weight_reader import LoadProgress


def run_node(
    request: LaunchRequest, environ: MutableMapping[str, str], *, has_to_print: bool
) -> None:
    """Runs a node until the launch ends. Raises ConfigError, ClusterError, EngineDeadError."""
    loaded = request.load(environ)
    node = this_node(request, environ)
    layout = request.layout(loaded, node.num_nodes)
    if has_to_print:
        typer.echo("\n".join(_describe(node, layout)))
        typer.echo(loaded.to_yaml(), nl=False)
        return
    if is_spare_copy(environ):
        typer.echo(f"node {node.node_rank}: one process per node is enough, so this one exits")
        return
    set_up_logs(loaded.config.log)
    logging.getLogger("moe_serve.cluster.launch").setLevel(
        logging.INFO
    )  # nodes that joined or left
    file = request.options.nodes.secret_file
    is_shared = file is not None or read_secret(environ) is not None
    secret = find_secret(file, environ, is_needed=node.num_nodes > 1)
    if node.node_rank == 0:
        can_be_joined = is_shared and _can_be_joined(loaded, node)
        _run_node_0(request, loaded, node, layout, can_be_joined=can_be_joined)
    else:
        # Before it connects, as the ranks of this node read the files from its own disk.
        local_model(loaded.config.engine.model.path, is_quiet=is_json_log())
        run_agent(loaded.config, node, secret, environ)


def this_node(request: LaunchRequest, environ: Mapping[str, str]) -> NodeEnvironment:
    hostname = socket.gethostname()
    if request.cluster is None:
        return detect_node(environ, hostname, request.node)
    interfaces = psutil.net_if_addrs().values()
    addresses = frozenset(item.address for items in interfaces for item in items)
    return find_node(request.cluster, environ, hostname, addresses, request.node)


def _can_be_joined(loaded: LoadedConfig, node: NodeEnvironment) -> bool:
    """Returns True if further nodes may join: the launch has cells and was given an address."""
    return node.kind != "single" and bool(cell_shapes(loaded.config.engine))


def find_secret(
    file: Path | None, environ: MutableMapping[str, str], *, is_needed: bool
) -> ClusterSecret:
    """Returns the secret that all nodes share, and sets the environment variable that the engine
    reads. Raises ConfigError if `is_needed` is true and no secret was given."""
    if file is not None:
        environ[CLUSTER_SECRET_VARIABLE] = f"@{file}"
    secret = read_secret(environ)
    if secret is None and is_needed:
        raise ConfigError(
            f"the nodes need a secret that all share: set {CLUSTER_SECRET_VARIABLE}, or give "
            "--secret-file FILE; make one with: openssl rand -hex 32"
        )
    secret = secret or new_secret()
    environ.update(secret.environment())
    return secret


def run_agent(
    config: Config, node: NodeEnvironment, secret: ClusterSecret, environ: Mapping[str, str]
) -> None:
    """Runs the agent of a node that was there from the start; see `run_life`."""

    def find(timeout_s: float) -> Channel[AgentMessage]:
        channel = connect_agent(node, socket.gethostname(), secret, timeout_s)
        found = f"node {node.node_rank} of {node.num_nodes} has found node 0 at {node.coordinator}"
        tell(found)
        return channel

    run_life(config, find, secret, environ)


def run_life(
    config: Config,
    find: Callable[[float], Channel[AgentMessage]],
    secret: ClusterSecret,
    environ: Mapping[str, str],
    *,
    has_joined: bool = False,
) -> None:
    """Runs the agent until node 0 dismisses it or stays lost, or until a signal arrives and the
    drain timeout has passed. `find`: see `NodeLife`."""
    cluster = config.engine.cluster
    life = NodeLife(
        find,
        lambda host: NodeRanks(host, secret, environ),
        start_timeout_s=cluster.start_timeout_s,
        rejoin_s=cluster.rejoin_s,
        has_joined=has_joined,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: life.stop(config.server.drain_timeout_s))
    life.run()


def _run_node_0(
    request: LaunchRequest,
    loaded: LoadedConfig,
    node: NodeEnvironment,
    layout: NodeLayout,
    *,
    can_be_joined: bool,
) -> None:
    check_is_guarded(loaded.config.server)
    check_can_listen(loaded.config.server)
    host = own_address(node.coordinator_host, node.num_nodes)
    config = config_of_node_0(loaded.config, layout, host)
    join_s = config.engine.cluster.rejoin_s if can_be_joined else None

    def make_nodes(secret: ClusterSecret) -> NodeStarter:
        """Accepts the agents and waits for them: the engine starts ranks once all have arrived."""
        ranks, num_threads = NodeRanks(host, secret, os.environ), config.engine.model.num_threads
        starter = NodeStarter(
            layout, ranks, devices=request.devices(), num_threads=num_threads, join_s=join_s
        )
        if node.num_nodes > 1 or can_be_joined:
            try:
                starter.listen(HostPort(host, node.coordinator_port), secret)
                if node.num_nodes > 1:
                    tell(f"node 0 waits for {node.num_nodes - 1} more at {host}:{starter.port}")
                if can_be_joined:
                    tell(f"further nodes may join at {host}:{starter.port}")
                starter.wait_for_nodes(config.engine.cluster.start_timeout_s)
            except BaseException:
                starter.stop()
                raise
        return starter

    def make_starter(host: str, port: int, secret: ClusterSecret, num_threads: int) -> RankStarter:
        starter = make_nodes(secret)
        starter.use_coordinator(HostPort(host, port))
        return starter

    build: BuildEngine = functools.partial(build_cluster, make_starter=make_starter)
    if shapes := cell_shapes(config.engine):
        build = functools.partial(_build_cells, CellNodes(make_nodes, shapes))
    run_service(
        config,
        build,
        settings=loaded.entries,
        has_local_ranks=node.num_nodes == 1,
    )


def _build_cells(
    nodes: CellNodes, config: EngineConfig, progress: LoadProgress | None = None
) -> BuiltEngine:
    built = build_cells(config, progress, starter_of_cells(nodes), nodes)
    assert built.cells is not None, "there are cells"
    nodes.remove_cell = built.cells.remove_cell
    return built


def starter_of_cells(nodes: CellNodes) -> StarterOfCell:
    """Returns the object that starts the ranks of each cell on the nodes of a launch."""

    def of_cell(cell: NewCell) -> MakeStarter:
        return lambda host, port, secret, num_threads: nodes.starter_of(
            cell.index, cell.shape, HostPort(host, port), secret, cell.node
        )

    return of_cell


def config_of_node_0(config: Config, layout: NodeLayout, host: str) -> Config:
    """Returns the configuration for node 0. Ranks and coordinator listen at `host`, and the ranks
    of a node share its cores equally, because all nodes are alike.
    """
    most = max(len(ranks) for ranks in layout.nodes)
    threads = config.engine.model.num_threads or max(1, (os.cpu_count() or 1) // most)
    engine = replace(
        config.engine,
        model=replace(config.engine.model, num_threads=threads),
        cluster=replace(config.engine.cluster, host=host),
    )
    return replace(config, engine=engine)


def tell(line: str) -> None:
    with optional_output(line):
        typer.echo(line)


def _describe(node: NodeEnvironment, layout: NodeLayout) -> list[str]:
    where = f"# this is node {node.node_rank} of {node.num_nodes} ({node.kind}), "
    lines = [f"{where}node 0 is at {node.coordinator}"]
    return lines + [f"# node {n}: {layout.describe(n)}" for n in range(layout.num_nodes)]


def join_launch(
    options: LaunchOptions, node: JoiningNode, environ: MutableMapping[str, str]
) -> None:
    """Runs the agent until its cells have left after a signal, or the launch ends. Raises
    ConfigError and ClusterError."""
    given = {} if options.model is None else {"model.path": options.model}
    loaded = load_config(
        flags={**given, **flag_settings(settings(options))},
        environ=environ,
        file=options.run.config_file,
    )
    set_up_logs(loaded.config.log)
    secret = find_secret(options.nodes.secret_file, environ, is_needed=True)
    # Before the node connects, because its ranks read the files from its own disk.
    local_model(loaded.config.engine.model.path, is_quiet=is_json_log())
    limit = loaded.config.engine.cluster.start_timeout_s
    tell(f"node {node.name} looks for the launch at {node.coordinator}, for up to {limit:g} s")

    def find(timeout_s: float) -> Channel[AgentMessage]:
        channel = connect_joining(node, socket.gethostname(), secret, timeout_s)
        found = f"node {node.name} offers {node.num_places} places"
        tell(f"{found} to the launch at {node.coordinator}")
        return channel

    run_life(loaded.config, find, secret, environ, has_joined=True)
