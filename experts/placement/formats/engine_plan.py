"""Shared parts of the engines' formats: slots in a row, cut into equal parts by device.

L layers with routed experts, P slots of a layer (experts and replicas), D devices. Slot p is on
device p // (P / D) and holds one expert; no slot is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from experts.placement.judge.copies import copies_in_slots, copies_of, placement_of
from experts.placement.placement_error import PlacementError, PlacementInputError
from experts.placement.problem.model_facts import ModelFacts
from experts.placement.problem.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """Facts that some files lack. `layers` lists the model's numbers of the layers with routed
    experts."""

    layers: tuple[int, ...] | None = None
    num_layers: int | None = None  # of the model, with dense layers
    num_experts: int | None = None
    num_devices: int | None = None

    @classmethod
    def of_model(
        cls, model: ModelFacts, num_devices: int | None, num_experts: int | None = None
    ) -> PlanFacts:
        """Takes the facts of a model; `num_experts` takes precedence over the model's."""
        return cls(
            layers=model.sparse,
            num_layers=model.num_layers,
            num_experts=num_experts or model.num_experts,
            num_devices=num_devices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """A file's plan. In the file a device may hold an expert twice (EPLB does that), but not in a
    placement; `slots_LED` then counts the copies, with layers ascending."""

    format: str
    placement: Placement
    slots_LED: NDArray[np.int64] | None = None

    @property
    def copies_LED(self) -> NDArray[np.int64]:  # noqa: N802
        """Copies of each expert on each device, with layers ascending."""
        if self.slots_LED is not None:
            return self.slots_LED
        return copies_of(self.placement, sorted(self.placement.ranks_of))

    @property
    def num_doubled(self) -> int:
        """Copies, over all layers, that share their device with another copy of the same expert."""
        return 0 if self.slots_LED is None else int(np.maximum(self.slots_LED - 1, 0).sum())

    def only(self, layers: Sequence[int]) -> EnginePlan:
        """Returns the plan of some of its layers, in ascending order."""
        kept = sorted(layers)
        rows = [sorted(self.placement.ranks_of).index(layer) for layer in kept]
        return replace(
            self,
            placement=replace(
                self.placement, ranks_of={layer: self.placement.ranks_of[layer] for layer in kept}
            ),
            slots_LED=None if self.slots_LED is None else self.slots_LED[rows],
        )


def only_layers(plan: EnginePlan, layers: tuple[int, ...], name: str) -> EnginePlan:
    """Returns the plan of these layers. Raises PlacementInputError if some of them are missing;
    `name` says where the plan is from."""
    ranks_of = plan.placement.ranks_of
    missing = [layer for layer in layers if layer not in ranks_of]
    if missing:
        raise PlacementInputError(
            f"{name} has {len(ranks_of)} layers, but not layer {missing[0]} of the loads: "
            "give the dense layers with --model or --dense-layers."
        )
    return plan.only(layers)


_MAX_SIZE = 2**28  # layers x experts x devices

Slots = Mapping[int, Sequence[int]]  # layer -> the expert of each slot


def plan_of_slots(slots: Slots, facts: PlanFacts, name: str) -> EnginePlan:
    """Makes a plan from slots. Worked example, one layer [0, 1, 2, 0] on two devices: the ranks of
    experts 0, 1, 2 are [0, 1], [0], [1]."""
    if facts.num_devices is None:
        raise PlacementError(
            f"A plan for {name} does not state its number of devices: give the cluster "
            "(--cluster), or the number of devices (--devices)."
        )
    if not slots:
        raise PlacementError("The plan has no layers; it needs at least one.")
    num_slots = len(next(iter(slots.values())))
    num_experts = _num_experts(slots, facts, num_slots)
    _check_even(num_slots, facts.num_devices)
    for layer, experts in slots.items():
        if len(experts) != num_slots:
            raise PlacementError(
                f"Layer {layer} has {len(experts)} slots and other layers {num_slots}; all layers "
                "must have the same number."
            )
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
    """Returns, for each layer, the expert of each slot, ascending on a device. Refuses a placement
    whose devices or layers hold different numbers of copies.
    """
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
                f"The plan has {min(counts)} copies of experts on one device and "
                f"{max(counts)} on another (layer {layer}), but {name} needs the same "
                "number on every device and in every layer: plan again with equal slots, "
                "and fill all of them."
            )
        slots[layer] = [expert for experts in held for expert in experts]
    return slots


def as_slots(value: Any, what: str) -> list[int]:
    """Checks that a value is a list of expert numbers. Raises PlacementError."""
    if not isinstance(value, list) or not value:
        raise PlacementError(f"{what} must be a list of experts, got {_shown(value)}.")
    for slot, expert in enumerate(value):
        if not is_index(expert):
            raise PlacementError(f"{what}, slot {slot}: {_shown(expert)} is not an expert number.")
    return value


def is_index(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**31


def check_keys(content: Any, wanted: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Checks that the content is an object with these keys and no others."""
    if not isinstance(content, dict):
        raise PlacementError(f"The content must be an object, got {_shown(content)}.")
    missing = sorted(set(wanted) - content.keys())
    more = sorted(map(str, content.keys() - {*wanted, *optional}))
    if missing or more:
        raise PlacementError(f"Keys are missing ({missing}) or unknown ({more}).")
    return content


def counted_layers(count: int, facts: PlanFacts) -> tuple[int, ...]:
    """Returns the model's numbers of the layers that a file counts 0 to `count` - 1 among those
    with experts; the file's own numbers if the model's are unknown."""
    layers = facts.layers if facts.layers is not None else tuple(range(count))
    if len(layers) != count:
        raise PlacementError(
            f"The plan has {count} layers, but the model has {len(layers)} with routed experts."
        )
    return layers


def check_size(num_layers: int, num_experts: int, num_devices: int) -> None:
    """Refuses sizes that would make a small file become a large object."""
    if num_layers * num_experts * num_devices > _MAX_SIZE:
        raise PlacementError(
            f"{num_layers} layers of {num_experts} experts on {num_devices} devices exceed "
            f"the size that a plan may have ({_MAX_SIZE} in all)."
        )


def _num_experts(slots: Slots, facts: PlanFacts, num_slots: int) -> int:
    largest = max(max(experts) for experts in slots.values())
    if max(largest + 1, facts.num_experts or 0) > num_slots:
        raise PlacementError(
            f"A layer has {num_slots} slots, which is too few for experts 0 to "
            f"{max(largest, (facts.num_experts or 0) - 1)}: each expert needs one."
        )
    if facts.num_experts is None:
        return largest + 1
    if largest >= facts.num_experts:
        raise PlacementError(
            f"The plan places expert {largest}, but experts are 0 to {facts.num_experts - 1}."
        )
    return facts.num_experts


def _check_even(num_slots: int, num_devices: int) -> None:
    if num_slots % num_devices:
        raise PlacementError(
            f"{num_slots} slots of a layer (experts and replicas) cannot be divided evenly "
            f"over {num_devices} devices: {num_slots % num_devices} are left over."
        )


def _check_all(layer: int, copies_E: NDArray[np.int64]) -> None:
    missing = np.flatnonzero(copies_E == 0)
    if len(missing):
        raise PlacementError(
            f"Layer {layer} has no slot for {len(missing)} of {len(copies_E)} experts; the first "
            f"is expert {missing[0]}."
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
