"""Reads the devices that a plan may use from a cluster.yaml.

    name: eight-devices            # configs/placement/eight-devices.yaml
    nodes:
      - {name: node-a, devices: 4}
      - {name: node-b, devices: [{slots: 5}, {slots: 5, speed: 0.9, memory_gib: 60}]}
    gb_per_s_in_node: 100
    gb_per_s_between_nodes: 25

The cluster file of `moe-serve launch` is read too: its expert ranks are the devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from experts.placement.problem.cluster_devices import ClusterDevice, ClusterDevices
from moe_serve.cluster.launch.cluster_file import parse_cluster_file
from moe_serve.config.yaml_nodes import plain_value, read_yaml, value_place
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

MAX_DEVICES = 2**14


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. `slots` is the number of expert copies in a layer; without it slots are shared
    out evenly."""

    slots: int | None = None
    speed: float = 1.0
    memory_gib: float | None = None  # for routed experts


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node. `devices` is a list of devices, or a number of identical ones that have the node's
    other values."""

    devices: Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)] | tuple[DeviceEntry, ...]
    name: str = ""
    slots: int | None = None
    speed: float = 1.0
    memory_gib: float | None = None

    @property
    def entries(self) -> tuple[ClusterDevice, ...]:
        if not isinstance(self.devices, int):
            return tuple(_device(entry) for entry in self.devices)
        return (_device(self),) * self.devices


class PlacementCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Bandwidths are those of one device, in 10^9 bytes per second."""

    nodes: tuple[NodeEntry, ...]
    name: str = ""
    gb_per_s_in_node: float = 100.0
    gb_per_s_between_nodes: float = 25.0


def read_cluster(path: Path) -> ClusterDevices:
    """Reads a cluster file, of `place` or of `launch`. Raises ConfigError."""
    return _devices_of(_read_file(path), str(path))


def _device(entry: DeviceEntry | NodeEntry) -> ClusterDevice:
    return ClusterDevice(slots=entry.slots, speed=entry.speed, memory_gib=entry.memory_gib)


def _devices_of(cluster: PlacementCluster, source: str) -> ClusterDevices:
    nodes = [node.entries for node in cluster.nodes]
    if not nodes or not all(nodes):
        raise ConfigError(
            f"{source}: it must have at least one node, and each node at least one device."
        )
    for memory_gib in (entry.memory_gib for node in nodes for entry in node):
        if memory_gib is not None and not 0 < memory_gib < float("inf"):
            raise ConfigError(
                f"{source}: memory_gib is {memory_gib}; it is above 0 and finite, or left out."
            )
    return ClusterDevices(
        entries=tuple(entry for node in nodes for entry in node),
        nodes=tuple(number for number, node in enumerate(nodes) for _ in node),
        source=source,
        gb_per_s_in_node=cluster.gb_per_s_in_node,
        gb_per_s_between_nodes=cluster.gb_per_s_between_nodes,
    )


def _read_file(path: Path) -> PlacementCluster:
    """Reads a cluster file. Raises ConfigError."""
    root = None
    try:
        text = regular_file(path).read_text("utf-8")
        root = read_yaml(text, str(path))
        content = plain_value(root)
        if isinstance(content, dict) and "coordinator" in content:
            return _launched(text, path)
        return msgspec.convert(content, PlacementCluster)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the cluster file {path}: {reason}.") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the cluster file {path} is not valid YAML: {reason}") from None
    except (msgspec.ValidationError, RecursionError) as error:
        place = value_place(root, str(error), str(path))
        raise ConfigError(f"the cluster file {path} is wrong: {error}{place}.") from None


def _launched(text: str, path: Path) -> PlacementCluster:
    """Reads a cluster file of `moe-serve launch`, whose expert ranks are numbered over the nodes in
    order."""
    cluster = parse_cluster_file(text, str(path))
    ranks = [rank for node in cluster.nodes for rank in node.expert_ranks]
    if ranks != sorted(ranks):
        raise ConfigError(f"{path}: the expert ranks {ranks} do not ascend from node to node.")
    return PlacementCluster(
        name=cluster.name,
        nodes=tuple(
            NodeEntry(name=node.name, devices=len(node.expert_ranks))
            for node in cluster.nodes
            if node.expert_ranks
        ),
    )
