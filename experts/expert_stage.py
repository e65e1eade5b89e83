"""The expert stage of a model: all layers' experts that live here, and nothing between layers.

Knows nothing of attention, of requests, or of where its rows come from. T rows, K choices per row,
D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from experts.expert_layer import ExpertLayer, MakeBank
from experts.memory.expert_memory import ExpertMemory
from experts.routed_rows import RoutedRows
from experts.slot_room import SlotRoom
from moe_kernels.interface.kernels import ExpertBank


class ExpertStage:
    """`run(layer, rows)` -> the rows' weighted expert outputs, [T, D] in fp32."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer | None],
        memory: ExpertMemory | None = None,
        room: SlotRoom | None = None,
    ) -> None:
        """`memory`: where the layers' experts are, if it has not room for all. `room`: where they
        are if they may be exchanged for others."""
        self._layers = tuple(layers)  # None: a dense layer
        self.memory, self.room = memory, room

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have routed experts, here or elsewhere."""
        return tuple(layer for layer, banks in enumerate(self._layers) if banks is not None)

    def run(self, layer: int, rows: RoutedRows) -> Tensor:
        return self._of(layer).total(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)

    def partial(
        self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """The part [T, D] in fp64 that the experts here have in the rows' sums; id -1: elsewhere.

        The parts of all ranks, added in any order and rounded to fp32, are what `run` gives where
        all experts are in one place, bit for bit.
        """
        return self._of(layer).partial(x_TD, expert_ids_TK, weights_TK)

    def foresee(self, layer: int, micro_batch: int, following_E: Tensor | None) -> None:
        """Before a micro-batch's rows of this layer: what they will need in the next one, uint8
        [E] of 255; None: nobody knows. For a memory to read ahead by; changes no output."""
        if self.memory is not None:
            known = None if following_E is None else following_E.cpu().numpy()
            self.memory.foresee(layer, micro_batch, known)

    def held(self, layer: int) -> frozenset[int]:
        """The experts of a layer that are here; none in a dense layer."""
        banks = self._layers[layer]
        return frozenset() if banks is None else banks.held

    def add(self, layer: int, bank: ExpertBank, experts: Collection[int]) -> None:
        """Take over experts that are not here yet."""
        self.take(layer, lambda: bank, experts)

    def take(self, layer: int, make_bank: MakeBank, experts: Collection[int]) -> None:
        """The same; `make_bank` reads them where there is no memory that does so later."""
        self._of(layer).take(make_bank, experts)

    def drop_added(self) -> None:
        """Give back all that was taken over."""
        for banks in self._layers:
            if banks is not None:
                banks.drop_added()

    def own(self, held: Mapping[int, Collection[int]]) -> None:
        """What the rank was given is this from now on, in these layers: with a memory or a room,
        where what is new was staged before."""
        if self.room is not None:
            self.room.switch(held)
        for layer, experts in held.items():
            self._of(layer).own(experts)

    def _of(self, layer: int) -> ExpertLayer:
        banks = self._layers[layer]
        assert banks is not None, f"rows were sent for layer {layer}, which has no routed experts"
        return banks
