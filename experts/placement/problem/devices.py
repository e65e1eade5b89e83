"""What a plan may use: devices with slots for experts, on nodes that links join."""

from __future__ import annotations

from dataclasses import dataclass

from experts.placement.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One expert rank."""

    node: int
    num_slots: int  # copies of experts in each layer
    speed: float = 1.0  # relative: a device of speed 2 should get twice the load
    memory_bytes: int | None = None  # for expert weights of all layers; None: not limited

    def __post_init__(self) -> None:
        if self.node < 0 or self.num_slots < 1:
            raise PlacementError(
                f"A device on node {self.node} with {self.num_slots} slots is none: nodes count "
                "from 0, slots from 1."
            )
        if not 0 < self.speed < float("inf"):
            raise PlacementError(f"A device's speed is {self.speed}; it is above 0 and finite.")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise PlacementError(f"A device's memory is {self.memory_bytes} bytes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """All expert ranks, in their order, and the bandwidths of one between them."""

    devices: tuple[Device, ...]
    bytes_per_s_in_node: float = 100e9
    bytes_per_s_between_nodes: float = 25e9

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlacementError("There is no device to put experts on.")
        for name in ("bytes_per_s_in_node", "bytes_per_s_between_nodes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise PlacementError(f"{name} is {getattr(self, name)}; it is above 0.")
        nodes = sorted({device.node for device in self.devices})
        if nodes != list(range(len(nodes))):
            raise PlacementError(f"Nodes are numbered {nodes}, not from 0 without a gap.")

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def num_nodes(self) -> int:
        """Nodes, each with a device at least."""
        return 1 + max(device.node for device in self.devices)

    @property
    def num_slots(self) -> int:
        """Of all devices together, in one layer."""
        return sum(device.num_slots for device in self.devices)


def even_devices(num_devices: int, num_nodes: int, num_slots: int) -> Devices:
    """`num_slots` in all, in equal parts; devices in runs of one node."""
    if num_devices < 1 or num_nodes < 1 or num_devices % num_nodes:
        raise PlacementError(f"{num_devices} devices do not stand on {num_nodes} nodes evenly.")
    if num_slots < 1 or num_slots % num_devices:
        raise PlacementError(
            f"{num_slots} slots (experts and replicas) do not divide over {num_devices} devices: "
            f"{num_slots % num_devices} too many, or {-num_slots % num_devices} too few."
        )
    per_node = num_devices // num_nodes
    return Devices(
        devices=tuple(
            Device(node=device // per_node, num_slots=num_slots // num_devices)
            for device in range(num_devices)
        )
    )
