"""Runs an expert rank's exchange as one call, from the frames with rows to the frames with sums.

The call gives the same bits as its parts run one by one. E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experts.expert_stage import ExpertStage
from moe_kernels.interface.kernels import ExpertBank, Kernels
from moe_kernels.interface.rank_kernels import (
    ExpertService,
    ExpertsOfLayer,
    FrameShape,
    RankKernels,
    ServiceParts,
)
from moe_serve.model.spec import RouterSpec
from moe_serve.model.stage.feed_forward import Router
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.frames.frame_header import Exchange, key_of
from moe_serve.pipeline.frames.wire import CombineFrame, DispatchFrame, WireFormat


@dataclass(frozen=True, slots=True)
class ArrivedFrame:
    """A frame with rows that has arrived: its attention rank, and the rows that were planned."""

    sender: int
    frame: DispatchFrame
    planned: int


class RankServices:
    """The calls of one expert rank, one for each layer.

    A layer has no call while its experts are in several banks or change, if rows may have adapters,
    or if a policy chooses copies on this side.
    """

    def __init__(
        self,
        stage: ExpertStage,
        calls: RankKernels,
        shape: FrameShape,
        *,
        rank: int,
        router: RouterSpec,
        routers: Sequence[Router | None] | None,
        split: RowSplit | None,
    ) -> None:
        """`routers`, `split`: given if experts are chosen on this side."""
        self._stage, self._calls, self._shape = stage, calls, shape
        self._rank, self._router, self._routers = rank, router, routers
        self._split = split
        self._services: dict[int, ExpertService | None] = {}  # made when a layer is first served

    @classmethod
    def of(
        cls,
        kernels: Kernels,
        stage: ExpertStage,
        wire: WireFormat,
        *,
        num_ranks: int,
        rank: int,
        router: RouterSpec,
        routers: Sequence[Router | None] | None,
        split: RowSplit | None,
    ) -> RankServices | None:
        """Returns None if the kernels have no such call, or do not read frames of this kind."""
        calls = kernels.rank_calls()
        shape = wire.frame_shape(num_ranks, has_choices=routers is None)
        if calls is None or shape is None or stage.memory is not None:
            return None
        if routers is not None and router.is_weighing_inputs:
            return None
        return cls(stage, calls, shape, rank=rank, router=router, routers=routers, split=split)

    def use(self, split: RowSplit) -> None:
        """Uses the new places of experts from the next step on."""
        self._split = split
        self._services.clear()

    def bank(self, layer: int) -> ExpertBank | None:
        """Returns the bank that serves a layer now; None if the layer is not for a call."""
        if self._stage.adapters is not None or self._service(layer) is None:
            return None
        return self._stage.layer(layer).only_bank

    def step_layers(self, layers: Sequence[int]) -> list[ExpertsOfLayer] | None:
        """Returns the object that serves these layers in one call; None if a layer does not support
        it."""
        if self._stage.adapters is not None:
            return None
        found = []
        for layer in layers:
            service, bank = self._service(layer), self._stage.layer(layer).only_bank
            if service is None or bank is None:
                return None
            found.append(ExpertsOfLayer(layer, service, bank))
        return found

    @property
    def kernels(self) -> RankKernels:
        return self._calls

    def serve(
        self,
        bank: ExpertBank,
        exchange: Exchange,
        arrived: Sequence[ArrivedFrame],
        frames: Sequence[CombineFrame],
    ) -> list[int] | None:
        """Fills in a frame for each one that has arrived; returns their bytes, 0 for a sender
        without rows. None: something is wrong, and nothing was done."""
        service = self._service(exchange.layer)
        assert service is not None, f"layer {exchange.layer} does not support a call"
        return service(
            bank,
            key_of(exchange),
            [each.frame.address for each in arrived],
            [frame.address for frame in frames],
            [each.planned for each in arrived],
        )

    def _service(self, layer: int) -> ExpertService | None:
        if layer not in self._services:
            self._services[layer] = self._made(layer)
        return self._services[layer]

    def _made(self, layer: int) -> ExpertService | None:
        spec, copies = self._router, None
        if self._routers is None:
            parts = ServiceParts(rank=self._rank, num_experts=spec.num_experts)
            return self._calls.service(self._shape, parts)
        router, split = self._routers[layer], self._split
        assert router is not None and split is not None, "experts are chosen here"
        if self._shape.num_ranks > 1:
            copies = self._copies(layer, split)
            if copies is None:
                return None
        return self._calls.service(
            self._shape,
            ServiceParts(
                rank=self._rank,
                num_experts=spec.num_experts,
                router=router.linear,
                router_shape=spec.shape,
                selection_bias_E=router.selection_bias_E,
                copies=copies,
            ),
        )

    def _copies(self, layer: int, split: RowSplit) -> Any | None:
        table = split.copies(layer)
        return None if table is None else self._calls.copies(table)
