"""Reads a cluster file: `configs/clusters/*.yaml`.

    name: two-nodes
    coordinator: {host: 10.0.0.1, port: 29600}
    nodes:
      - {name: node-a, address: 10.0.0.1, attention_ranks: [0, 1], devices: [0, 1]}
      - {name: node-b, address: 10.0.0.2, expert_ranks: [0, 1], devices: [0, 1]}
    model: /models/some-checkpoint
    serve:
      scheduler: {max_num_seqs: 128}

The file is typed; unknown keys, repeated keys and secrets are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.launch.environment import NodeEnvironment, NodeFlags, detect_node
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.cluster.launch.node_layout import NodeLayout, explicit_layout
from moe_serve.config.keys import SECRETS
from moe_serve.config.yaml_nodes import plain_value, read_yaml, value_place
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file


class CoordinatorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of node 0 and the port on which it listens for the other nodes."""

    host: str
    port: int = 29600


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node. Its ranks take its devices in order, attention first; no devices: the CPU."""

    name: str
    address: str
    attention_ranks: tuple[int, ...] = ()
    expert_ranks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[RankName, ...]:
        attention = (RankName("attention", rank) for rank in self.attention_ranks)
        return (*attention, *(RankName("expert", rank) for rank in self.expert_ranks))


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. The first node is node 0; `serve` has the sections of configs/serve.yaml."""

    name: str
    coordinator: CoordinatorEntry
    nodes: tuple[ClusterNode, ...]
    model: str | None = None
    serve: dict[str, dict[str, Any]] = {}

    @property
    def layout(self) -> NodeLayout:
        return explicit_layout([node.ranks for node in self.nodes], self.name)

    @property
    def endpoint(self) -> HostPort:
        return HostPort(self.coordinator.host, self.coordinator.port)

    @property
    def settings(self) -> dict[str, object]:
        """Returns settings such as {"scheduler.max_num_seqs": 128}. Loading them checks the
        keys."""
        return {
            f"{section}.{name}": value
            for section, values in self.serve.items()
            for name, value in values.items()
        }


def read_cluster_file(path: Path) -> ClusterFile:
    """Reads and checks the file; raises ConfigError with the file and the place."""
    try:
        text = regular_file(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the cluster file {path}: {reason}.") from error
    return parse_cluster_file(text, str(path))


def parse_cluster_file(text: str, source: str) -> ClusterFile:
    root = None
    try:
        root = read_yaml(text, source)
        cluster = msgspec.convert(plain_value(root), ClusterFile)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the cluster file {source} is not valid YAML: {reason}") from error
    except RecursionError:
        raise ConfigError(
            f"the cluster file {source} has values that are nested too deeply."
        ) from None
    except msgspec.ValidationError as error:
        place = value_place(root, str(error), source)
        raise ConfigError(f"the cluster file {source} is wrong: {error}{place}.") from error
    _check(cluster, source)
    return cluster


def find_node(
    cluster: ClusterFile,
    environ: Mapping[str, str],
    hostname: str,
    addresses: frozenset[str],
    flags: NodeFlags,
) -> NodeEnvironment:
    """Finds this host's node in the file: by flag, else by name or address, else by the
    launcher.

    `addresses` are those of this host. Raises ConfigError.
    """
    num_nodes = len(cluster.nodes)
    if flags.num_nodes not in (None, num_nodes):
        raise ConfigError(
            f"--num-nodes is {flags.num_nodes}, but the cluster {cluster.name} has {num_nodes}."
        )
    node_rank = flags.node_rank
    if node_rank is None:
        node_rank = _node_by_name(cluster, hostname, addresses)
    if node_rank is None:
        node_rank = _node_by_launcher(cluster, environ, hostname)
    coordinator = flags.coordinator or cluster.endpoint
    whole = NodeFlags(node_rank=node_rank, num_nodes=num_nodes, coordinator=coordinator)
    return detect_node(environ, hostname, whole)


def _node_by_name(cluster: ClusterFile, hostname: str, addresses: frozenset[str]) -> int | None:
    own = {hostname, hostname.partition(".")[0], *addresses}
    found = [rank for rank, node in enumerate(cluster.nodes) if own & {node.name, node.address}]
    if len(found) > 1:
        names = " and ".join(cluster.nodes[rank].name for rank in found)
        raise ConfigError(
            f"this host is both {names} of the cluster {cluster.name}; choose one with --node-rank."
        )
    return found[0] if found else None


def _node_by_launcher(cluster: ClusterFile, environ: Mapping[str, str], hostname: str) -> int:
    environment = detect_node(environ, hostname, NodeFlags(coordinator=None))
    if environment.num_nodes == len(cluster.nodes):
        return environment.node_rank
    names = ", ".join(f"{node.name} ({node.address})" for node in cluster.nodes)
    if environment.kind == "single":
        raise ConfigError(
            f"{hostname} is not a node of the cluster {cluster.name}: {names}; choose one "
            "with --node-rank."
        )
    raise ConfigError(
        f"the launcher ({environment.kind}) has {environment.num_nodes} nodes, but the cluster "
        f"{cluster.name} has {len(cluster.nodes)}: {names}."
    )


def _check(cluster: ClusterFile, source: str) -> None:
    if not cluster.nodes:
        raise ConfigError(f"the cluster file {source} has no nodes; list at least one.")
    if not 1 <= cluster.coordinator.port <= 65535:
        raise ConfigError(
            f"coordinator.port is {cluster.coordinator.port} ({source}): it takes an integer in "
            "[1, 65535]."
        )
    for what, values in (
        ("name", [node.name for node in cluster.nodes]),
        ("address", [node.address for node in cluster.nodes]),
    ):
        doubled = sorted({value for value in values if values.count(value) > 1})
        if doubled or "" in values:
            raise ConfigError(
                f"each node needs its own {what}: {doubled or 'one'} is repeated or empty"
                f" ({source})."
            )
    for node in cluster.nodes:
        num_ranks = len(node.ranks)
        if node.devices and len(node.devices) < num_ranks:
            raise ConfigError(
                f"node {node.name} has {num_ranks} ranks and {len(node.devices)} devices "
                f"({source}); each rank takes one."
            )
        if (
            min((rank.index for rank in node.ranks), default=0) < 0
            or min(node.devices, default=0) < 0
        ):
            raise ConfigError(f"node {node.name} has a negative rank or device ({source}).")
    explicit_layout([node.ranks for node in cluster.nodes], source)
    for name in sorted(SECRETS):
        keys = cluster.settings.get(name)
        told = keys if isinstance(keys, list) else [] if keys is None else [keys]
        if any(not str(key).startswith("@") for key in told):
            raise ConfigError(
                f"serve.{name} holds a key in plain text ({source}); write @FILE instead."
            )
