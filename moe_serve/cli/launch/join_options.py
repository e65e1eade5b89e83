"""Checks the options of a node that joins a launch. It imports nothing slow."""

from __future__ import annotations

import os
import secrets
import socket

from moe_serve.cli.launch.launch_options import LaunchOptions
from moe_serve.cli.serve.rank_options import RankCounts, RankOptions
from moe_serve.cluster.launch.hosts import parse_endpoint
from moe_serve.cluster.launch.node_agent import JoiningNode
from moe_serve.cluster.launch.node_places import objection_to_node
from moe_serve.cluster.members.rank_starter import num_accelerators
from moe_serve.errors import ConfigError


def joining_node(options: LaunchOptions) -> JoiningNode:
    """Returns the node that the options describe. Raises ConfigError."""
    _check(options)
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
            f"--join adds this node to a running launch, which has these settings already: leave "
            f"out {', '.join(given)}."
        )
