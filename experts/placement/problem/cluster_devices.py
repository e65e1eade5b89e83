"""The devices that a plan may use, before the slots of each are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.placement.placement_error import PlacementInputError
from experts.placement.problem.devices import Device, Devices

_GIB, _GB = 2**30, 1e9


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
                f"{num_devices} devices do not divide evenly over {num_nodes} nodes: write "
                "a cluster file."
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
                f"{self.source}: {len(stated)} of {len(self.entries)} devices state their slots: "
                "give the slots of all devices or of none."
            )
        if num_replicas is not None and sum(stated) != num_experts + num_replicas:
            raise PlacementInputError(
                f"--replicas {num_replicas} and {num_experts} experts are "
                f"{num_experts + num_replicas} slots of a layer, and the devices of {self.source} "
                f"have {sum(stated)}: leave out one of them."
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
            f"{num_experts} experts and {num_replicas} replicas are {num_slots} slots, which do "
            f"not divide over {num_devices} devices: take {words} replicas, or give each device its"
            " slots in a cluster file."
        )
    return num_slots
