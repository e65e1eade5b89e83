"""The devices of a plan: slots for experts, nodes, and clusters of equal devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.placement.placement_error import PlacementError, PlacementInputError

_GIB, _GB = 2**30, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The slots, speed and memory of one expert rank."""

    node: int
    num_slots: int  # copies of experts in each layer
    speed: float = 1.0  # relative; a device of speed 2 should get twice the load
    memory_bytes: int | None = None  # for expert weights of all layers; None means unlimited

    def __post_init__(self) -> None:
        if self.node < 0 or self.num_slots < 1:
            raise PlacementError(
                "A device's node must be 0 or more and its num_slots 1 or more, got node "
                f"{self.node} and {self.num_slots} slots."
            )
        if not 0 < self.speed < float("inf"):
            raise PlacementError(f"A device's speed must be above 0 and finite, got {self.speed}.")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise PlacementError(
                f"A device's memory_bytes must be 1 or more, got {self.memory_bytes}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """All expert ranks in order, and the bandwidth of one device within and between nodes."""

    devices: tuple[Device, ...]
    bytes_per_s_in_node: float = 100e9
    bytes_per_s_between_nodes: float = 25e9

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlacementError("There are no devices; give at least one.")
        for name in ("bytes_per_s_in_node", "bytes_per_s_between_nodes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PlacementError(
                    f"{name} must be above 0 and finite, got {getattr(self, name)}."
                )
        nodes = sorted({device.node for device in self.devices})
        if nodes != list(range(len(nodes))):
            raise PlacementError(f"Nodes must be numbered from 0 without a gap, got {nodes}.")

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def num_nodes(self) -> int:
        """Number of nodes; each has at least one device."""
        return 1 + max(device.node for device in self.devices)

    @property
    def num_slots(self) -> int:
        """Slots of all devices together, in one layer."""
        return sum(device.num_slots for device in self.devices)


def even_devices(num_devices: int, num_nodes: int, num_slots: int) -> Devices:
    """Returns identical devices that share `num_slots` equally; consecutive devices are on one
    node."""
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise PlacementError(
            f"{num_devices} devices cannot be spread evenly over {num_nodes} nodes: give a number "
            f"of devices that {num_nodes} divides."
        )
    if num_slots < 1 or num_slots % num_devices:
        raise PlacementError(
            f"{num_slots} slots (experts and replicas) cannot be divided evenly over "
            f"{num_devices} devices: remove {num_slots % num_devices} or add "
            f"{-num_slots % num_devices}."
        )
    per_node = num_devices // num_nodes
    return Devices(
        devices=tuple(
            Device(node=device // per_node, num_slots=num_slots // num_devices)
            for device in range(num_devices)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDevice:
    """One device. `slots` is the number of expert copies in a layer; without it slots are shared
    out evenly."""

    slots: int | None = None
    speed: float = 1.0
    memory_gib: float | None = None  # for routed experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDevices:
    """Devices by node, before the number of copies on each is known."""

    entries: tuple[ClusterDevice, ...]
    nodes: tuple[int, ...]  # of each device
    source: str
    gb_per_s_in_node: float = 100.0
    gb_per_s_between_nodes: float = 25.0

    @classmethod
    def even(
        cls, num_devices: int, num_nodes: int = 1, source: str = "--devices"
    ) -> ClusterDevices:
        """Returns identical devices, in equal runs per node. `source` names the option in
        messages."""
        if num_devices % num_nodes:
            raise PlacementInputError(
                f"{num_devices} devices cannot be spread evenly over {num_nodes} nodes: "
                "give the nodes in a cluster file (--cluster)."
            )
        per_node = num_devices // num_nodes
        return cls(
            entries=(ClusterDevice(),) * num_devices,
            nodes=tuple(device // per_node for device in range(num_devices)),
            source=source,
        )

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
        PlacementInputError."""
        stated = [entry.slots for entry in self.entries if entry.slots is not None]
        if not stated:
            each = _even_slots(num_experts, num_replicas or 0, len(self.entries))
            return [each // len(self.entries)] * len(self.entries)
        if len(stated) < len(self.entries):
            raise PlacementInputError(
                f"{self.source}: only {len(stated)} of {len(self.entries)} devices state "
                "their slots: give the slots of all devices or of none."
            )
        if num_replicas is not None and sum(stated) != num_experts + num_replicas:
            raise PlacementInputError(
                f"--replicas {num_replicas} and {num_experts} experts need "
                f"{num_experts + num_replicas} slots in each layer, but the devices of "
                f"{self.source} have {sum(stated)}: leave out --replicas or the slots."
            )
        return stated


def _even_slots(num_experts: int, num_replicas: int, num_devices: int) -> int:
    """Returns equal slots for all copies of a layer. If they do not divide, the error lists numbers
    of replicas that do."""
    num_slots = num_experts + num_replicas
    if num_devices < 1 or num_replicas < 0:
        raise PlacementInputError(
            f"there must be at least 1 device and 0 replicas, got {num_devices} and {num_replicas}."
        )
    rest = num_slots % num_devices
    if rest:
        fits = (num_replicas - rest, num_replicas - rest + num_devices)
        most = (num_devices - 1) * num_experts  # every expert on every device
        words = " or ".join(str(count) for count in fits if 0 <= count <= most) or f"{most}"
        raise PlacementInputError(
            f"{num_experts} experts and {num_replicas} replicas are {num_slots} slots, "
            f"which cannot be divided evenly over {num_devices} devices: take {words} "
            "replicas, or give each device its slots in a cluster file."
        )
    return num_slots
