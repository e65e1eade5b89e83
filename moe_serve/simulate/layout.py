"""Divides attention and experts among the devices of a simulation, with the memory they need.

A *cell* is a set of ranks that step together. A layout has one or more equal cells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_serve.errors import ConfigError

MAX_DEVICES = 1024
_SPLIT = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)A([1-9]\d*)E", re.IGNORECASE)
_WHOLE = re.compile(r"(?:([1-9]\d*)x)?colocated", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`num_cells` cells of `num_attention` attention ranks and `num_experts` expert ranks each.

    `num_experts` 0: the experts are spread over the devices of the cell's attention ranks.
    `num_shards`: devices of an attention rank, among which its heads are split. `num_redundant`:
    further copies of experts, all placed by the loads of the experts; None: in their order.
    """

    name: str
    num_cells: int
    num_attention: int
    num_experts: int
    num_shards: int = 1
    num_redundant: int | None = None

    @property
    def is_split(self) -> bool:
        """True if experts have devices of their own."""
        return self.num_experts > 0

    @property
    def num_cell_devices(self) -> int:
        return self.num_attention * self.num_shards + self.num_experts

    @property
    def num_devices(self) -> int:
        return self.num_cells * self.num_cell_devices

    @property
    def num_holders(self) -> int:
        """The number of a cell's devices among which the experts are spread."""
        return self.num_experts or self.num_attention * self.num_shards

    def num_held(self, num_experts: int) -> int:
        """Returns the most experts of a layer that a device has, with copies."""
        return -(-(num_experts + (self.num_redundant or 0)) // self.num_holders)

    @classmethod
    def parse(cls, text: str, num_devices: int, num_shards: int = 1) -> Layout:
        """Parses "replicas", "colocated", "4xcolocated", "2A4E" or "2x2A4E" for a number of
        devices.

        Raises ConfigError if the layout does not use exactly these devices.
        """
        if not 1 <= num_devices <= MAX_DEVICES:
            raise ConfigError(f"devices must be in [1, {MAX_DEVICES}], got {num_devices}.")
        if not 1 <= num_shards <= num_devices:
            raise ConfigError(
                f"tensor-shards must be in [1, {num_devices}], the number of devices; "
                f"got {num_shards}."
            )
        if found := _SPLIT.fullmatch(text):
            counts = [int(number or 1) for number in found.groups()]
            num_cells, num_attention, num_experts = counts
        else:
            num_cells = _num_whole_cells(text, num_devices, num_shards)
            num_attention = max(1, num_devices // (num_cells * num_shards))
            num_experts = 0
        layout = cls(
            name=text,
            num_cells=num_cells,
            num_attention=num_attention,
            num_experts=num_experts,
            num_shards=num_shards,
        )
        if layout.num_devices != num_devices:
            raise ConfigError(
                f"layout {text} with {num_shards} tensor shards takes {layout.num_devices} "
                f"devices, but devices is {num_devices}."
            )
        return layout


def _num_whole_cells(text: str, num_devices: int, num_shards: int) -> int:
    if text.lower() == "replicas":
        return max(1, num_devices // num_shards)
    if found := _WHOLE.fullmatch(text):
        return int(found[1] or 1)
    raise ConfigError(
        f"layout cannot be {text!r}: it takes replicas, colocated, 4xcolocated, 2A4E, or 2x2A4E."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The bytes of a model as loaded, and what bounds its requests.

    `attention_bytes`: everything but the routed experts; `expert_bytes`: all routed experts;
    `kv_token_bytes`: one token in the KV cache, all layers; `num_kv_parts`: the number of shards
    among which the cache of a token can be split (1: each shard has all of it).
    """

    name: str
    attention_bytes: int
    expert_bytes: int
    kv_token_bytes: int
    num_kv_parts: int
    num_experts: int
    max_context: int

    def device_bytes(self, layout: Layout) -> tuple[int, int]:
        """Returns the weights of a device that holds attention, and of one with experts only."""
        one_expert = self.expert_bytes / self.num_experts  # in all layers
        experts = int(layout.num_held(self.num_experts) * one_expert)
        attention = -(-self.attention_bytes // layout.num_shards)
        return (attention, experts) if layout.is_split else (attention + experts, 0)

    def num_pages(self, layout: Layout, memory_bytes: int, page_size: int) -> int:
        """Returns the KV pages of an attention rank, from the usable memory of a device.

        Raises ConfigError if the weights do not fit a device.
        """
        attention, experts = self.device_bytes(layout)
        for what, needed in (("attention", attention), ("expert", experts)):
            if needed > memory_bytes:
                raise ConfigError(
                    f"{self.name} does not fit the layout {layout.name} on {layout.num_devices} "
                    f"devices: the weights of an {what} device are {needed / 2**30:.1f} GiB, and "
                    f"{memory_bytes / 2**30:.1f} GiB of its memory are usable."
                )
        token = self.kv_token_bytes / min(layout.num_shards, self.num_kv_parts)
        return int((memory_bytes - attention) / token) // page_size
