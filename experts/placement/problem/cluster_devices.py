"""The devices that a plan may use: a cluster.yaml, or a number of identical devices.

    name: eight-devices            # configs/placement/eight-devices.yaml
    nodes:
      - {name: node-a, devices: 4}
      - {name: node-b, devices: [{slots: 5}, {slots: 5, speed: 0.9, memory_gib: 60}]}
    gb_per_s_in_node: 100
    gb_per_s_between_nodes: 25

The cluster file of `moe-serve launch` is read too: its expert ranks are the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from experts.placement.problem.devices import Device, Devices
from moe_serve.cluster.launch.cluster_file import parse_cluster_file
from moe_serve.config.yaml_nodes import plain_value, read_yaml, value_place
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

MAX_DEVICES = 2**14
_GIB, _GB = 2**30, 1e9


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
    def entries(self) -> tuple[DeviceEntry, ...]:
        if not isinstance(self.devices, int):
            return self.devices
        alike = DeviceEntry(slots=self.slots, speed=self.speed, memory_gib=self.memory_gib)
        return (alike,) * self.devices


class PlacementCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Bandwidths are those of one device, in 10^9 bytes per second."""

    nodes: tuple[NodeEntry, ...]
    name: str = ""
    gb_per_s_in_node: float = 100.0
    gb_per_s_between_nodes: float = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDevices:
    """Devices by node, before the number of copies on each is known."""

    entries: tuple[DeviceEntry, ...]
    nodes: tuple[int, ...]  # of each device
    source: str
    gb_per_s_in_node: float = 100.0
    gb_per_s_between_nodes: float = 25.0

    def with_slots(self, slots: Sequence[int]) -> Devices:
        """Returns the devices with these slots. Raises PlacementError."""
        return Devices(
            devices=tuple(
                Device(
                    node=node,
                    num_slots=count,
                    speed=entry.speed,
                    memory_bytes=None
                    if entry.memory_gib is None
                    else round(entry.memory_gib * _GIB),
                )
                for node, count, entry in zip(self.nodes, slots, self.entries, strict=True)
            ),
            bytes_per_s_in_node=self.gb_per_s_in_node * _GB,
            bytes_per_s_between_nodes=self.gb_per_s_between_nodes * _GB,
        )

    def slots(self, num_experts: int, num_replicas: int | None) -> list[int]:
        """Returns the stated slots, or the experts and their replicas in equal parts. Raises
        ConfigError."""
        stated = [entry.slots for entry in self.entries if entry.slots is not None]
        if not stated:
            each = _even_slots(num_experts, num_replicas or 0, len(self.entries))
            return [each // len(self.entries)] * len(self.entries)
        if len(stated) < len(self.entries):
            raise ConfigError(
                f"{self.source}: {len(stated)} of {len(self.entries)} devices state their slots: "
                "give the slots of all devices or of none."
            )
        if num_replicas is not None and sum(stated) != num_experts + num_replicas:
            raise ConfigError(
                f"--replicas {num_replicas} and {num_experts} experts are "
                f"{num_experts + num_replicas} slots of a layer, and the devices of {self.source} "
                f"have {sum(stated)}: leave out one of them."
            )
        return stated


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrder:
    """The options of the command line about devices."""

    cluster: Path | None
    num_devices: int | None
    num_nodes: int | None
    num_replicas: int | None

    def check(self, *, is_needed: bool) -> None:
        """Checks the options before any load is read. Raises ConfigError."""
        if self.cluster is not None and self.num_devices is not None:
            raise ConfigError("give either --cluster FILE or --devices N, not both.")
        if is_needed and self.cluster is None and self.num_devices is None:
            raise ConfigError("give --cluster FILE or --devices N: a plan needs devices.")
        if self.num_nodes is not None and self.num_devices is None:
            raise ConfigError("--nodes belongs to --devices; a cluster file states its own nodes.")

    def read(self) -> ClusterDevices | None:
        """Returns the devices; None if no option names any. Raises ConfigError."""
        if self.cluster is not None:
            return _devices_of(_read(self.cluster), str(self.cluster))
        return None if self.num_devices is None else self.alike(self.num_devices)

    def alike(self, num_devices: int) -> ClusterDevices:
        """Returns `num_devices` identical devices, in equal runs per node."""
        num_nodes = self.num_nodes or 1
        if num_devices % num_nodes:
            raise ConfigError(
                f"{num_devices} devices do not divide evenly over {num_nodes} nodes: write "
                "a cluster file."
            )
        per_node = num_devices // num_nodes
        return ClusterDevices(
            entries=(DeviceEntry(),) * num_devices,
            nodes=tuple(device // per_node for device in range(num_devices)),
            source="--devices",
        )


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


def _even_slots(num_experts: int, num_replicas: int, num_devices: int) -> int:
    """Returns equal slots for all copies of a layer. If they do not divide, the error lists numbers
    of replicas that do."""
    num_slots = num_experts + num_replicas
    if num_devices < 1 or num_replicas < 0:
        raise ConfigError(
            f"there must be at least 1 device and 0 replicas, got {num_devices} and {num_replicas}."
        )
    rest = num_slots % num_devices
    if rest:
        fits = (num_replicas - rest, num_replicas - rest + num_devices)
        most = (num_devices - 1) * num_experts  # every expert on every device
        words = " or ".join(str(count) for count in fits if 0 <= count <= most) or f"{most}"
        raise ConfigError(
            f"{num_experts} experts and {num_replicas} replicas are {num_slots} slots, which do "
            f"not divide over {num_devices} devices: take {words} replicas, or give each device its"
            " slots in a cluster file."
        )
    return num_slots


def _read(path: Path) -> PlacementCluster:
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
