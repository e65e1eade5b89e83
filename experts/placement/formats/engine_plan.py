"""What the formats of engines share: slots in a row, cut into equal parts by device.

L layers with routed experts, P slots of a layer (experts and replicas), D devices. Slot p lies on
device p // (P / D), and holds one expert; no slot is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from experts.placement.errors import PlacementError
from experts.placement.judge.copies import copies_in_slots, copies_of, placement_of
from experts.placement.problem.plan import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What some files do not say. `layers`: the model's numbers of those with routed experts."""

    layers: tuple[int, ...] | None = None
    num_layers: int | None = None  # of the model, dense ones too
    num_experts: int | None = None
    num_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """A file's plan. A device may hold an expert twice in the file (EPLB does that), and never in a
    placement: `slots_LED` then counts its copies, with layers ascending.
    """

    format: str
    placement: Placement
    slots_LED: NDArray[np.int64] | None = None

    @property
    def copies_LED(self) -> NDArray[np.int64]:  # noqa: N802
        """Copies of each expert on each device, of layers ascending."""
        if self.slots_LED is not None:
            return self.slots_LED
        return copies_of(self.placement, sorted(self.placement.ranks_of))

    @property
    def num_doubled(self) -> int:
        """Copies that lie beside another of the same expert on their device, in all layers."""
        return 0 if self.slots_LED is None else int(np.maximum(self.slots_LED - 1, 0).sum())

    def only(self, layers: Sequence[int]) -> EnginePlan:
        """Of some of its layers, in ascending order."""
        kept = sorted(layers)
        rows = [sorted(self.placement.ranks_of).index(layer) for layer in kept]
        return replace(
            self,
            placement=replace(
                self.placement, ranks_of={layer: self.placement.ranks_of[layer] for layer in kept}
            ),
            slots_LED=None if self.slots_LED is None else self.slots_LED[rows],
        )


_MAX_SIZE = 2**28  # layers x experts x devices

Slots = Mapping[int, Sequence[int]]  # layer -> the expert of each slot


def plan_of_slots(slots: Slots, facts: PlanFacts, name: str) -> EnginePlan:
    """Worked example, one layer [0, 1, 2, 0] on two devices: ranks of experts 0, 1, 2 are [0, 1],
    [0], [1]."""
    if facts.num_devices is None:
        raise PlacementError(
            f"A plan for {name} does not say for how many devices it is: name the cluster, or the "
            "number of devices."
        )
    if not slots:
        raise PlacementError("It has no layers.")
    num_slots = len(next(iter(slots.values())))
    num_experts = _num_experts(slots, facts, num_slots)
    _check_even(num_slots, facts.num_devices)
    for layer, experts in slots.items():
        if len(experts) != num_slots:
            raise PlacementError(f"Layer {layer} has {len(experts)} slots, others {num_slots}.")
    layers = sorted(slots)
    check_size(len(layers), num_experts, facts.num_devices)
    slots_LDC = np.array([slots[layer] for layer in layers], dtype=np.int64)
    copies_LED = copies_in_slots(slots_LDC.reshape(len(layers), facts.num_devices, -1), num_experts)
    for layer, copies_ED in zip(layers, copies_LED, strict=True):
        _check_all(layer, copies_ED.sum(axis=1))
    return EnginePlan(
        format=name,
        placement=placement_of(copies_LED, layers),
        slots_LED=copies_LED if copies_LED.max() > 1 else None,
    )


def slots_of_plan(placement: Placement, name: str) -> dict[int, list[int]]:
    """Layer -> the expert of each slot, ascending on a device. Refused where devices, or layers,
    hold different numbers of copies."""
    slots = {}
    counts = set()
    for layer in sorted(placement.ranks_of):
        held: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        for expert, ranks in enumerate(placement.ranks_of[layer]):
            for rank in ranks:
                held[rank].append(expert)
        counts |= {len(experts) for experts in held}
        if len(counts) > 1:
            raise PlacementError(
                f"The plan has {min(counts)} copies of experts on one device and {max(counts)} on "
                f"another (layer {layer}), and {name} takes the same number on every device and "
                "layer: plan with equal slots, and all of them used."
            )
        slots[layer] = [expert for experts in held for expert in experts]
    return slots


def as_slots(value: Any, what: str) -> list[int]:
    """A list of expert numbers. Raises PlacementError."""
    if not isinstance(value, list) or not value:
        raise PlacementError(f"{what} is {_shown(value)}, not a list of experts.")
    for slot, expert in enumerate(value):
        if not is_index(expert):
            raise PlacementError(f"{what}, slot {slot}: {_shown(expert)} is no expert.")
    return value


def is_index(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**31


def check_keys(content: Any, wanted: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """An object with these keys and no other."""
    if not isinstance(content, dict):
        raise PlacementError(f"It holds {_shown(content)}, not an object.")
    missing = sorted(set(wanted) - content.keys())
    more = sorted(map(str, content.keys() - {*wanted, *optional}))
    if missing or more:
        raise PlacementError(f"Keys are missing ({missing}) or more than are allowed ({more}).")
    return content


def counted_layers(count: int, facts: PlanFacts) -> tuple[int, ...]:
    """The model's numbers of layers that a file counts 0 to `count` - 1 among those with experts;
    these themselves where nobody knows better."""
    layers = facts.layers if facts.layers is not None else tuple(range(count))
    if len(layers) != count:
        raise PlacementError(
            f"It has {count} layers, and there are {len(layers)} with routed experts."
        )
    return layers


def check_size(num_layers: int, num_experts: int, num_devices: int) -> None:
    """A small file never becomes a large object."""
    if num_layers * num_experts * num_devices > _MAX_SIZE:
        raise PlacementError(
            f"{num_layers} layers of {num_experts} experts on {num_devices} devices are more than "
            f"a plan may have ({_MAX_SIZE} in all)."
        )


def _num_experts(slots: Slots, facts: PlanFacts, num_slots: int) -> int:
    largest = max(max(experts) for experts in slots.values())
    if max(largest + 1, facts.num_experts or 0) > num_slots:
        raise PlacementError(
            f"A layer has {num_slots} slots for experts 0 to "
            f"{max(largest, (facts.num_experts or 0) - 1)}: each needs one."
        )
    if facts.num_experts is None:
        return largest + 1
    if largest >= facts.num_experts:
        raise PlacementError(f"It places expert {largest}; there are {facts.num_experts}.")
    return facts.num_experts


def _check_even(num_slots: int, num_devices: int) -> None:
    if num_slots % num_devices:
        raise PlacementError(
            f"{num_slots} slots of a layer (experts and replicas) do not divide over {num_devices} "
            f"devices: {num_slots % num_devices} are left over."
        )


def _check_all(layer: int, copies_E: NDArray[np.int64]) -> None:
    missing = np.flatnonzero(copies_E == 0)
    if len(missing):
        raise PlacementError(
            f"Layer {layer} has no slot for {len(missing)} of {len(copies_E)} experts; the first "
            f"is {missing[0]}."
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
