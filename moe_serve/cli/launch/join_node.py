"""Runs a node that joins a launch which serves already: an agent that starts ranks of new cells."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import MutableMapping

from moe_serve.cli.launch.launch_node import find_secret, run_life, tell
from moe_serve.cli.launch.launch_options import LaunchOptions, NodeOptions
from moe_serve.cli.options import settings
from moe_serve.cli.serve.rank_options import RankCounts, RankOptions
from moe_serve.cli.serve.server_options import flag_settings
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.launch.hosts import parse_endpoint
from moe_serve.cluster.launch.node_agent import AgentMessage, JoiningNode, connect_joining
from moe_serve.cluster.launch.node_places import objection_to_node
from moe_serve.cluster.members.rank_starter import num_accelerators
from moe_serve.config.logs import is_json_log, set_up_logs
from moe_serve.config.sources import load_config
from moe_serve.errors import ConfigError
from moe_serve.model.hub.named_model import local_model


def join_launch(options: LaunchOptions, environ: MutableMapping[str, str]) -> None:
    """Runs the agent until its cells have left after a signal, or the launch ends. Raises
    ConfigError and ClusterError."""
    _check(options)
    given = {} if options.model is None else {"model.path": options.model}
    loaded = load_config(
        flags={**given, **flag_settings(settings(options))},
        environ=environ,
        file=options.run.config_file,
    )
    set_up_logs(loaded.config.log)
    node = _joining(options.nodes)
    secret = find_secret(options.nodes.secret_file, environ, is_needed=True)
    # Before it connects, as the ranks of this node read the files from its own disk.
    local_model(loaded.config.engine.model.path, is_quiet=is_json_log())

    def find(timeout_s: float) -> Channel[AgentMessage]:
        channel = connect_joining(node, socket.gethostname(), secret, timeout_s)
        found = f"node {node.name} offers {node.num_places} places"
        tell(f"{found} to the launch at {node.coordinator}")
        return channel

    run_life(loaded.config, find, secret, environ, has_joined=True)


def _check(options: LaunchOptions) -> None:
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
            f"--join offers this node to a launch that runs, which says what it does: leave out "
            f"{', '.join(given)}."
        )


def _joining(nodes: NodeOptions) -> JoiningNode:
    """Raises ConfigError."""
    name = socket.gethostname() if nodes.node is None else nodes.node
    num_places = nodes.places or num_accelerators() or len(os.sched_getaffinity(0))
    if (why := objection_to_node(name, num_places)) is not None:
        raise ConfigError(f"{why}; see --node NAME and --places N.")
    return JoiningNode(
        name=name,
        num_places=num_places,
        coordinator=parse_endpoint(nodes.join or "", "--join"),
        agent=secrets.token_hex(8),
    )
