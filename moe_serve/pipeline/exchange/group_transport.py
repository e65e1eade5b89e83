"""The attention side of the data plane: sends rows to the expert ranks and receives sums.

T rows of a micro-batch, n of them for one rank, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.interface.rank_kernels import FrameShape, RankKernels, StepKey
from moe_serve.model.stage.adapter_rows import adapter_numbers, with_virtual_ids
from moe_serve.model.stage.attention_stage import Routed
from moe_serve.pipeline.exchange.frame_layout import CompactLayout, FrameLayout, FramePool
from moe_serve.pipeline.exchange.native_lanes import NativeLanes, step_key
from moe_serve.pipeline.exchange.row_split import RankRows, RowSplit
from moe_serve.pipeline.exchange.step_shape import (
    StepShape,
    combine_tag,
    dispatch_tag,
    exchange_order,
)
from moe_serve.pipeline.frames.frame_header import HEADER_BYTES, Exchange, Leg, WireError, key_of
from moe_serve.pipeline.frames.wire import CombineFrame, DispatchFrame, FrameBytes, WireFormat
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage


class GroupTransport:
    """Implements Transport over a data group. Every rank in a step takes part in every exchange.

    `split` is None when experts are chosen on the expert side: all rows then go to all ranks.
    """

    def __init__(
        self,
        group: DataGroup,
        *,
        attention_rank: int,
        expert_ranks: Sequence[str],
        wire: WireFormat,
        split: RowSplit | None,
        sparse_layers: Sequence[int],
        log: StageLog,
        layout: FrameLayout | None = None,
        num_experts: int = 0,
    ) -> None:
        """`layout` None means the compact layout on a CPU. `num_experts`: of a layer, if rows may
        have adapters; else 0."""
        self._log, self._num_experts = log, num_experts
        self._layout = CompactLayout(torch.device("cpu")) if layout is None else layout
        self._group, self._rank, self._experts = group, attention_rank, tuple(expert_ranks)
        self._wire, self._split, self._layers = wire, split, tuple(sparse_layers)
        self._bytes = FrameBytes(wire)
        self._out = FramePool(self._layout.dispatch_frame)
        self._back = FramePool(self._layout.combine_frame)
        self._rows: dict[tuple[str, int], Tensor | None] = {}  # row numbers that a rank has
        self._shape = StepShape(group.epoch, -1, ())
        self._left: list[tuple[int, int]] = []  # exchanges not yet dispatched, in reverse
        self._told: set[str] = set()  # ranks that have their frame of the current exchange

    def use(self, split: RowSplit) -> None:
        """Uses the new places of experts from the next step on."""
        self._split = split

    def begin(self, shape: StepShape) -> None:
        """Begins a step; its shape determines all exchanges."""
        self._shape = shape
        rows = shape.rows[self._rank]
        order = exchange_order(self._layers, len(rows))
        if shape.some_layers:
            order = [(layer, i) for layer, i in order if shape.planned(self._rank, i, layer)]
        elif not all(rows):
            order = [(layer, i) for layer, i in order if rows[i]]
        self._left = order[::-1]
        self._told.clear()
        self._rows.clear()
        if self._layout.is_fixed:
            exchanges = [self._exchange(layer, micro_batch) for layer, micro_batch in order]
            self._layout.begin(exchanges, len(self._experts))

    def dispatch(self, layer: int, micro_batch: int, routed: Routed) -> None:
        """See `Transport.dispatch`. Receives are posted here, so that no sender waits for them."""
        expected = self._left[-1] if self._left else None
        assert expected == (layer, micro_batch), f"{(layer, micro_batch)} before {expected}"
        for name, part in zip(self._experts, self._parts(layer, routed), strict=True):
            self._send(name, layer, micro_batch, part, routed.foreseen_E)
        self._left.pop()
        self._told.clear()

    def combine(self, layer: int, micro_batch: int) -> Tensor:
        """See `Transport.combine`.

        The result may be a view of a buffer: use it before the next dispatch.

        Raises PeerLostError, or WireError if an expert rank failed.
        """
        planned = self._planned(layer, micro_batch)
        if len(self._experts) == 1:
            (name,) = self._experts
            frame, num_rows = self._receive(name, layer, micro_batch)
            assert num_rows == planned, f"{num_rows} sums arrived for {planned} rows"
            return frame.sums(self._wire, planned, num_rows)
        total_TD = torch.zeros(
            planned, self._wire.width, dtype=torch.float64, device=self._layout.device
        )
        for name in self._experts:
            if not self._back.is_used(name, micro_batch):
                continue  # this rank got no rows
            frame, num_rows = self._receive(name, layer, micro_batch)
            start = self._log.now()
            sums_nD = frame.sums(self._wire, planned, num_rows)
            rows_n = self._rows.pop((name, micro_batch))
            if self._split is None and not self._layout.is_fixed:
                rows_n = frame.row_numbers(num_rows).long()
            if rows_n is None:
                total_TD += sums_nD
            else:
                total_TD.index_add_(0, rows_n, sums_nD)
            self._log.add(Stage.COMBINE, layer, micro_batch, num_rows, start)
        return total_TD.float()

    def frame_shape(self) -> FrameShape | None:
        """Returns the frames as the kernels fill them in and read them; None: they do not."""
        if not self._layout.is_direct or (self._num_experts and self._split is None):
            return None
        return self._wire.frame_shape(len(self._experts), has_choices=self._split is not None)

    @property
    def split(self) -> RowSplit | None:
        """The places of experts in this step; None if the expert side chooses experts."""
        return self._split

    def key(self, layer: int, micro_batch: int) -> bytes:
        """Returns the beginning of the frames of an exchange."""
        return key_of(self._exchange(layer, micro_batch))

    def empty_frames(self, layer: int, micro_batch: int) -> list[DispatchFrame]:
        """Returns a frame for each expert rank, to be filled in and given to `send_frames`."""
        expected = self._left[-1] if self._left else None
        assert expected == (layer, micro_batch), f"{(layer, micro_batch)} before {expected}"
        size = self._bytes.dispatch(self._planned(layer, micro_batch))
        return [self._out.get(name, micro_batch, size) for name in self._experts]

    def send_frames(
        self, layer: int, micro_batch: int, frames: Sequence[DispatchFrame], sizes: Sequence[int]
    ) -> None:
        """Sends the first bytes of each frame. One that is only a header is not answered."""
        exchange = self._exchange(layer, micro_batch)
        for name, frame, size in zip(self._experts, frames, sizes, strict=True):
            self._begin_send(name, exchange, frame.first(size))
            if size > HEADER_BYTES:
                self._begin_receive(name, exchange)
        self._left.pop()
        self._told.clear()

    def native_lanes(self, kernels: RankKernels) -> NativeLanes:
        """Returns the links to all expert ranks, for calls that run several exchanges."""
        return NativeLanes(self._group, self._experts, kernels, self._log)

    def step_key(self, layer: int) -> StepKey:
        """Returns the keys of the exchanges that begin with a layer's first one."""
        return step_key(self._exchange(layer, 0))

    def leg(self, layer: int, micro_batch: int) -> Leg:
        """Returns the returning operation of an exchange, for error messages."""
        return Leg("combine", self._exchange(layer, micro_batch))

    def sent(self, num_exchanges: int) -> None:
        """Notes that native code has sent the rows of the next exchanges in order."""
        assert num_exchanges <= len(self._left), f"{num_exchanges} of {len(self._left)} exchanges"
        if num_exchanges:
            del self._left[-num_exchanges:]
            self._told.clear()

    def expect(self, layer: int, micro_batch: int, counts: Sequence[int]) -> None:
        """Expects sums of the rows that native code has sent to each rank."""
        exchange = self._exchange(layer, micro_batch)
        for name, count in zip(self._experts, counts, strict=True):
            self._back.drop(name, micro_batch)
            if count:
                self._begin_receive(name, exchange)

    def await_frames(self, layer: int, micro_batch: int) -> list[CombineFrame | None]:
        """Waits for the sums of each expert rank; None for one that got no rows."""
        return [
            self._await(name, layer, micro_batch) if self._back.is_used(name, micro_batch) else None
            for name in self._experts
        ]

    def wrong_frame(self, layer: int, micro_batch: int, rank: int) -> WireError:
        """Returns the fault of a rank's frame with sums."""
        name, exchange = self._experts[rank], self._exchange(layer, micro_batch)
        frame = self._back.peek(name, micro_batch)
        try:
            num_rows = frame.open(self._wire, exchange, self._planned(layer, micro_batch), name)
        except WireError as error:
            return error
        return WireError(f"{exchange}: {name} sent {num_rows} sums, not those of its rows.")

    def finish(self) -> None:
        """See `Transport.finish`."""
        since = time.perf_counter()
        self._group.settle()
        self._log.waited(since)
        self._layout.finish()

    def reset(self) -> None:
        """Does nothing: the caller that runs a step abandons it when it fails."""

    @torch.inference_mode()  # because the frames were made in it
    def abandon(self) -> None:
        """Runs through the remaining exchanges with no rows, because the step failed on this rank
        alone.

        This lets the expert ranks reach the end of the step too. Raises PeerLostError.
        """
        while self._left:
            layer, micro_batch = self._left.pop()
            for name in [name for name in self._experts if name not in self._told]:
                self._back.wait(name, micro_batch)
                planned = self._planned(layer, micro_batch)
                exchange = self._exchange(layer, micro_batch)
                frame = self._out.get(name, micro_batch, self._bytes.dispatch(planned))
                content = frame.write_nobody(self._wire, exchange, planned, self._layout.is_fixed)
                self._begin_send(name, exchange, content)
                if self._layout.is_fixed:
                    self._begin_receive(name, exchange)
            self._told.clear()
        self._back.wait_all()
        self._group.settle()

    def close(self) -> None:
        """Drops everything that refers to the group."""
        self._out.clear()
        self._back.clear()

    def _planned(self, layer: int, micro_batch: int) -> int:
        return self._shape.planned(self._rank, micro_batch, layer)

    def _exchange(self, layer: int, micro_batch: int) -> Exchange:
        return Exchange(self._shape.epoch, self._shape.step, layer, micro_batch)

    def _parts(self, layer: int, routed: Routed) -> list[RankRows]:
        rows = routed.rows
        if self._split is not None:
            if routed.adapted:
                rows = with_virtual_ids(rows, routed.adapted, self._num_experts)
            return self._layout.split(self._split, layer, rows)
        if self._num_experts:
            numbers_TK = adapter_numbers(rows.expert_ids_TK, routed.adapted)
            rows = replace(rows, expert_ids_TK=numbers_TK)
        everything = RankRows(None, routed.x_TD, rows.expert_ids_TK, rows.weights_TK)
        return [everything] * len(self._experts)

    def _send(
        self, name: str, layer: int, micro_batch: int, part: RankRows, foreseen_E: Tensor | None
    ) -> None:
        planned, exchange = self._planned(layer, micro_batch), self._exchange(layer, micro_batch)
        frame = self._out.get(name, micro_batch, self._bytes.dispatch(planned))
        is_routed = self._split is not None
        content = frame.write(
            self._wire,
            exchange,
            planned,
            part.x_nD,
            part.expert_ids_nK if is_routed or self._num_experts else None,
            part.weights_nK if is_routed else None,
            foreseen_E,
        )
        self._begin_send(name, exchange, content)
        if part.x_nD.shape[0]:
            self._rows[name, micro_batch] = part.rows_n
            self._begin_receive(name, exchange)

    def _begin_send(self, name: str, exchange: Exchange, content: Tensor) -> None:
        tag = dispatch_tag(exchange.layer, exchange.micro_batch)
        transfer = self._group.send(name, content, tag, Leg("dispatch", exchange))
        self._told.add(name)
        self._out.use(name, exchange.micro_batch, transfer)

    def _begin_receive(self, name: str, exchange: Exchange) -> None:
        size = self._bytes.combine(self._planned(exchange.layer, exchange.micro_batch))
        frame = self._back.get(name, exchange.micro_batch, size)
        tag = combine_tag(exchange.layer, exchange.micro_batch)
        leg = Leg("combine", exchange)
        transfer = self._group.receive(name, frame.first(size), tag, leg)
        self._back.use(name, exchange.micro_batch, transfer)

    def _receive(self, name: str, layer: int, micro_batch: int) -> tuple[CombineFrame, int]:
        frame, planned = self._await(name, layer, micro_batch), self._planned(layer, micro_batch)
        return frame, frame.open(self._wire, self._exchange(layer, micro_batch), planned, name)

    def _await(self, name: str, layer: int, micro_batch: int) -> CombineFrame:
        since, start = time.perf_counter(), self._log.now()
        self._log.enter(Stage.WAIT_COMBINE, layer, micro_batch, name)
        self._back.wait(name, micro_batch)
        self._log.waited(since)
        planned = self._planned(layer, micro_batch)
        self._log.add(Stage.WAIT_COMBINE, layer, micro_batch, planned, start)
        return self._back.peek(name, micro_batch)
