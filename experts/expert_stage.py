"""The expert stage of a model: the experts held here, of all layers, and nothing between layers.

Knows nothing of attention, of requests, or of the origin of its rows. T rows, K choices per row, D
model width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from experts.expert_layer import ExpertLayer, MakeBank
from experts.memory.expert_memory import ExpertMemory
from experts.slot_room import SlotRoom
from experts.virtual_experts import VirtualExperts
from moe_kernels.interface.kernels import ExpertBank


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Routed rows, made by the router: T rows, D model width, K choices. All tensors are on one
    device.

    `expert_ids_TK` ascends within a row, which fixes the order of the weighted sum.
    """

    x_TD: Tensor  # the model's dtype, normalised
    expert_ids_TK: Tensor  # int64, global expert ids
    weights_TK: Tensor  # fp32


class ExpertStage:
    """Holds the experts of each layer: `layer(i).total(...)` returns the rows' weighted expert
    outputs, [T, D] in fp32."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer | None],
        memory: ExpertMemory | None = None,
        room: SlotRoom | None = None,
    ) -> None:
        """`memory` stores the layers' experts if they do not all fit. `room` stores them if they
        may be exchanged for others while the server runs."""
        self._layers = tuple(layers)  # None for a dense layer
        self.memory, self.room = memory, room
        self.adapters: VirtualExperts | None = None  # set where rows may have virtual ids

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts, held here or elsewhere."""
        return tuple(layer for layer, banks in enumerate(self._layers) if banks is not None)

    def layer(self, layer: int) -> ExpertLayer:
        """Returns the experts of a layer, which must not be a dense one."""
        banks = self._layers[layer]
        assert banks is not None, f"rows were sent for layer {layer}, which has no routed experts"
        return banks

    def partial(
        self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Returns the part [T, D] in fp64 that the experts held here contribute to the rows' sums;
        id -1 marks a choice held elsewhere. Ids may be virtual if there are adapters.

        The parts of all ranks, added in any order and rounded to fp32, equal bit for bit the total
        where all experts are in one place.
        """
        experts = self.layer(layer)
        if self.adapters is not None:
            return self.adapters.partial(layer, experts, x_TD, expert_ids_TK, weights_TK)
        return experts.partial(x_TD, expert_ids_TK, weights_TK)

    def foresee(self, layer: int, micro_batch: int, following_E: Tensor | None) -> None:
        """Announces which experts a micro-batch will need in the next layer; called before its rows
        of this layer run.

        `following_E` holds probabilities as uint8 [E], in units of 1/255; None if there is no
        prediction. The memory reads ahead by it; no output changes.
        """
        if self.memory is not None:
            known = None if following_E is None else following_E.cpu().numpy()
            self.memory.foresee(layer, micro_batch, known)

    def held(self, layer: int) -> frozenset[int]:
        """Returns the experts of a layer that are held here; empty for a dense layer."""
        banks = self._layers[layer]
        return frozenset() if banks is None else banks.held

    def add(self, layer: int, bank: ExpertBank, experts: Collection[int]) -> None:
        """Takes over experts that are not held yet."""
        self.take(layer, lambda: bank, experts)

    def take(self, layer: int, make_bank: MakeBank, experts: Collection[int]) -> None:
        """Takes over experts that are not held yet; `make_bank` reads their weights unless a memory
        reads them later."""
        self.layer(layer).take(make_bank, experts)

    def drop_added(self) -> None:
        """Releases all experts that were taken over."""
        for banks in self._layers:
            if banks is not None:
                banks.drop_added()

    def own(self, held: Mapping[int, Collection[int]]) -> None:
        """Replaces the experts that this rank owns in these layers.

        Works only with a memory or with a room; in a room the new experts must be staged already.
        """
        if self.room is not None:
            self.room.switch(held)
        for layer, experts in held.items():
            self.layer(layer).own(experts)
