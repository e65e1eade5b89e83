"""Describes the devices of a plan, with their slots for experts, and the nodes they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.placement_error import PlacementError


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
    """Return identical devices that share `num_slots` equally; consecutive devices are on one
    node."""
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise PlacementError(
            f"{num_devices} devices cannot be spread evenly over {num_nodes} nodes: give a number "
            f"of devices that {num_nodes} divides."
        )
    if num_slots < 1 or num_slots % num_devices:
        raise PlacementError(
            f"{num_slots} slots (experts and replicas) do not divide over {num_devices} devices: "
            f"remove {num_slots % num_devices} or add {-num_slots % num_devices}."
        )
    per_node = num_devices // num_nodes
    return Devices(
        devices=tuple(
            Device(node=device // per_node, num_slots=num_slots // num_devices)
            for device in range(num_devices)
        )
    )
