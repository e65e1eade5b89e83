"""The expert side of a step: it receives rows from every attention rank, multiplies them together,
and sends sums back.

n rows of one attention rank, D model width, K choices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage, RoutedRows
from moe_kernels.interface.rank_kernels import ServiceStep
from moe_serve.pipeline.exchange.frame_layout import CompactLayout, FrameLayout, FramePool
from moe_serve.pipeline.exchange.native_lanes import NativeLanes, step_key
from moe_serve.pipeline.exchange.next_layer import together
from moe_serve.pipeline.exchange.rank_services import ArrivedFrame, RankServices
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.exchange.step_shape import (
    StepShape,
    combine_tag,
    dispatch_tag,
    exchange_order,
)
from moe_serve.pipeline.frames.frame_header import Exchange, Leg
from moe_serve.pipeline.frames.wire import FrameBytes, WireFormat
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.timeline.stage_log import StageLog
from moe_serve.pipeline.timeline.timeline_recorder import Stage

_log = logging.getLogger(__name__)

Route = Callable[[int, Tensor], RoutedRows]  # (layer, normed rows [n, D]) -> their experts


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that came from one attention rank in one exchange."""

    attention_rank: int
    rows: RoutedRows
    row_numbers_n: Tensor | None  # of the rows this rank serves, if it routed them itself


class ExpertLoop:
    """Serves steps with the experts of this rank.

    `route` and `split` are given when experts are chosen on this side.
    """

    def __init__(
        self,
        group: DataGroup,
        stage: ExpertStage,
        *,
        expert_rank: int,
        attention_ranks: Sequence[str],
        wire: WireFormat,
        sparse_layers: Sequence[int],
        route: Route | None = None,
        split: RowSplit | None = None,
        log: StageLog,
        layout: FrameLayout | None = None,
        services: RankServices | None = None,
    ) -> None:
        """`layout` None means the compact layout on a CPU. `services` runs the exchanges of layers
        as single calls, if there are such calls.
        """
        self._services = services
        self._log = log
        self._layout = CompactLayout(torch.device("cpu")) if layout is None else layout
        self._group, self._stage, self._rank = group, stage, expert_rank
        self._names, self._wire = tuple(attention_ranks), wire
        self._layers, self._route, self._split = tuple(sparse_layers), route, split
        self._bytes = FrameBytes(wire)
        self._in = FramePool(self._layout.dispatch_frame)
        self._back = FramePool(self._layout.combine_frame)
        self._lanes: NativeLanes | None = None
        if services is not None:
            self._lanes = NativeLanes(group, self._names, services.kernels, log)
        self._call: ServiceStep | None = None  # made when it is first used
        self.failure: str | None = None  # of the last step

    @torch.inference_mode()
    def run(self, shape: StepShape) -> None:
        """Serves one step.

        A layer that fails is answered with error frames and reported in `failure`. Raises
        PeerLostError or WireError if no answer can be sent.
        """
        self.failure = None
        order = exchange_order(self._layers, shape.num_micro_batches)
        begin = self._serve_step(shape)
        exchanges = [Exchange(shape.epoch, shape.step, *each) for each in order[begin:]]
        self._layout.begin(exchanges, len(self._names))
        for layer, micro_batch in order[begin : begin + shape.num_micro_batches]:
            self._post(shape, layer, micro_batch)
        for index, exchange in enumerate(exchanges, begin):
            layer, micro_batch = exchange.layer, exchange.micro_batch
            following = index + shape.num_micro_batches
            post = order[following] if following < len(order) else None
            arrived = self._arrived(shape, exchange)
            if self._services is not None and self._serve(shape, exchange, arrived, post):
                continue
            arrivals = self._arrivals(exchange, arrived)
            sums = self._sums(layer, micro_batch, arrivals)
            start = self._log.now()
            if post is not None:
                self._post(shape, *post)
            for arrival, sums_nD in zip(arrivals, sums, strict=True):
                self._answer(shape, exchange, arrival, sums_nD)
            rows = sum([arrival.rows.x_TD.shape[0] for arrival in arrivals])
            self._log.add(Stage.SEND, layer, micro_batch, rows, start)
        self._back.wait_all()
        since = time.perf_counter()
        self._group.settle()
        self._log.waited(since)
        self._layout.finish()

    def _serve_step(self, shape: StepShape) -> int:
        """Serves as many exchanges as possible, from the first on, as one call with the messages
        between them. Returns their number. Raises PeerLostError."""
        lanes, services, num_batches = self._lanes, self._services, shape.num_micro_batches
        is_open = lanes is not None and lanes.is_usable and self._layers and num_batches
        if lanes is None or services is None or not is_open or shape.some_layers:
            return 0
        layers = services.step_layers(self._layers)
        if layers is None:
            return 0
        if self._call is None:
            self._call = services.kernels.service_step()
        call, key = self._call, step_key(self._exchange_at(shape, 0))
        end, error = lanes.run(
            lambda lent: call(layers, shape.rows, lent, key),
            lambda: call.place,
            self._layers,
            num_batches,
            lambda done: Leg("dispatch", self._exchange_at(shape, done)),
        )
        if error is not None:
            raise error
        return end.done

    def _exchange_at(self, shape: StepShape, place: int) -> Exchange:
        layer = self._layers[place // shape.num_micro_batches]
        return Exchange(shape.epoch, shape.step, layer, place % shape.num_micro_batches)

    def use(self, split: RowSplit) -> None:
        """Uses the new places of experts from the next step on."""
        self._split = split
        if self._services is not None:
            self._services.use(split)

    def close(self) -> None:
        """Drops everything that refers to the group."""
        self._in.clear()
        self._back.clear()

    def _post(self, shape: StepShape, layer: int, micro_batch: int) -> None:
        """Posts the receives of an exchange before they are needed, so that senders need not
        wait."""
        exchange = Exchange(shape.epoch, shape.step, layer, micro_batch)
        for sender in shape.senders(micro_batch, layer):
            name = self._names[sender]
            size = self._bytes.dispatch(shape.planned(sender, micro_batch, layer))
            frame = self._in.get(name, micro_batch, size)
            tag = dispatch_tag(layer, micro_batch)
            leg = Leg("dispatch", exchange)
            transfer = self._group.receive(name, frame.first(size), tag, leg)
            self._in.use(name, micro_batch, transfer)

    def _arrived(self, shape: StepShape, exchange: Exchange) -> list[ArrivedFrame]:
        """Waits for the frames of all attention ranks that have rows in an exchange."""
        arrived, log = [], self._log
        layer, micro_batch = exchange.layer, exchange.micro_batch
        for sender in shape.senders(micro_batch, layer):
            name, planned = self._names[sender], shape.planned(sender, micro_batch, layer)
            since, start = time.perf_counter(), log.now()
            log.enter(Stage.WAIT_DISPATCH, layer, micro_batch, name)
            self._in.wait(name, micro_batch)
            log.waited(since)
            log.add(Stage.WAIT_DISPATCH, layer, micro_batch, planned, start)
            arrived.append(ArrivedFrame(sender, self._in.peek(name, micro_batch), planned))
        return arrived

    def _serve(
        self,
        shape: StepShape,
        exchange: Exchange,
        arrived: Sequence[ArrivedFrame],
        post: tuple[int, int] | None,
    ) -> bool:
        """Serves an exchange as one call, and posts the receives of a later one. Returns False, and
        does nothing, if the exchange does not support a call or is faulty and must be examined.
        """
        assert self._services is not None, "there are such calls"
        layer, micro_batch, log = exchange.layer, exchange.micro_batch, self._log
        bank, start = self._services.bank(layer), log.now()
        if bank is None or not arrived:
            return False
        log.enter(Stage.EXPERTS, layer, micro_batch)
        frames = []
        for each in arrived:
            size = self._bytes.combine(each.planned)
            frames.append(self._back.get(self._names[each.sender], micro_batch, size))
        sizes = self._services.serve(bank, exchange, arrived, frames)
        if sizes is None:
            return False
        num_rows = sum([each.planned for each in arrived])
        start = log.add(Stage.EXPERTS, layer, micro_batch, num_rows, start)
        if post is not None:
            self._post(shape, *post)
        for each, frame, size in zip(arrived, frames, sizes, strict=True):
            if size:
                self._send(exchange, self._names[each.sender], frame.first(size))
        log.add(Stage.SEND, layer, micro_batch, num_rows, start)
        return True

    def _arrivals(self, exchange: Exchange, arrived: Sequence[ArrivedFrame]) -> list[Arrival]:
        """Returns the rows of those attention ranks that sent any."""
        arrivals, foreseen = [], list[Tensor]()
        for each in arrived:
            frame, planned = each.frame, each.planned
            num_rows = frame.open(self._wire, exchange, planned, self._names[each.sender])
            if num_rows:
                x_nD = frame.rows(self._wire, planned, num_rows)
                ids, weights = frame.choices(self._wire, planned, num_rows)
                arrivals.append(self._arrival(exchange.layer, each.sender, x_nD, ids, weights))
                if self._wire.num_foreseen:
                    foreseen.append(frame.foreseen(self._wire))
        if self._wire.num_foreseen:
            self._stage.foresee(exchange.layer, exchange.micro_batch, together(foreseen))
        return arrivals

    def _arrival(
        self, layer: int, sender: int, x_nD: Tensor, ids_nK: Tensor, weights_nK: Tensor
    ) -> Arrival:
        if self._route is None or self._split is None:
            return Arrival(sender, RoutedRows(x_nD, ids_nK.long(), weights_nK), None)
        routed, adapters = self._route(layer, x_nD), self._stage.adapters
        if adapters is not None:  # the frame has the numbers of the rows' adapters
            ids_nK = adapters.virtual_ids(layer, routed.expert_ids_TK, ids_nK[:, 0])
            routed = replace(routed, expert_ids_TK=ids_nK)
        part = self._layout.split(self._split, layer, routed)[self._rank]
        rows = RoutedRows(part.x_nD, part.expert_ids_nK, part.weights_nK)
        if self._layout.is_fixed:
            return Arrival(sender, rows, None)
        numbers = part.rows_n
        if numbers is None:
            numbers = torch.arange(len(x_nD), device=self._layout.device)
        return Arrival(sender, rows, numbers)

    def _sums(self, layer: int, micro_batch: int, arrivals: list[Arrival]) -> list[Tensor | None]:
        """Computes all arrivals in one product -> sums for each, or None for those that failed."""
        parts = [arrival.rows for arrival in arrivals]
        counts = [part.x_TD.shape[0] for part in parts]
        if not sum(counts):
            return [torch.empty(0, self._wire.width, dtype=torch.float64) for _ in parts]
        try:
            start = self._log.now()
            whole = parts[0] if len(parts) == 1 else _joined(parts)
            start = self._log.add(Stage.PACK, layer, micro_batch, sum(counts), start)
            self._log.enter(Stage.EXPERTS, layer, micro_batch)
            sums_TD = self._stage.partial(layer, whole.x_TD, whole.expert_ids_TK, whole.weights_TK)
        except Exception as error:
            _log.exception("layer %d failed with %d rows", layer, sum(counts))
            self.failure = f"layer {layer}, {sum(counts)} rows: {error}"
            if len(arrivals) == 1:
                return [None]
            each = [self._sums(layer, micro_batch, [arrival]) for arrival in arrivals]
            return [sums for (sums,) in each]  # rows of other ranks need not fail with it
        self._log.add(Stage.EXPERTS, layer, micro_batch, sum(counts), start)
        return [sums_TD] if len(counts) == 1 else list(sums_TD.split(counts))

    def _answer(
        self, shape: StepShape, exchange: Exchange, arrival: Arrival, sums_nD: Tensor | None
    ) -> None:
        name = self._names[arrival.attention_rank]
        planned = shape.planned(arrival.attention_rank, exchange.micro_batch, exchange.layer)
        frame = self._back.get(name, exchange.micro_batch, self._bytes.combine(planned))
        if sums_nD is None:
            content = frame.write_error(self._wire, exchange, planned, self._layout.is_fixed)
        else:
            numbers = arrival.row_numbers_n
            content = frame.write(self._wire, exchange, planned, sums_nD, numbers)
        self._send(exchange, name, content)

    def _send(self, exchange: Exchange, name: str, content: Tensor) -> None:
        tag = combine_tag(exchange.layer, exchange.micro_batch)
        transfer = self._group.send(name, content, tag, Leg("combine", exchange))
        self._back.use(name, exchange.micro_batch, transfer)


def _joined(parts: list[RoutedRows]) -> RoutedRows:
    return RoutedRows(
        torch.cat([part.x_TD for part in parts]),
        torch.cat([part.expert_ids_TK for part in parts]),
        torch.cat([part.weights_TK for part in parts]),
    )
