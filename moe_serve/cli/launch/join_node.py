"""Runs a node that joins a running launch: an agent that starts ranks of new cells."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

from moe_serve.cli.launch.launch_node import find_secret, run_life, tell
from moe_serve.cli.launch.launch_options import LaunchOptions
from moe_serve.cli.options import settings
from moe_serve.cli.serve.server_options import flag_settings
from moe_serve.cluster.control.channel import Channel
from moe_serve.cluster.launch.node_agent import AgentMessage, JoiningNode, connect_joining
from moe_serve.config.logs import is_json_log, set_up_logs
from moe_serve.config.sources import load_config
from moe_serve.model.hub.named_model import local_model


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
