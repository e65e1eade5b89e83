"""An expert rank: serves steps with the experts that it holds, and loads others when told to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from experts.expert_stage import RoutedRows
from experts.virtual_experts import VirtualExperts
from moe_serve.adapters.adapter_part import AdapterPart, LiveModel
from moe_serve.cluster.control.adapter_messages import DropAdapter, LoadAdapter
from moe_serve.cluster.control.epoch import layout_of, meet, sparse_layers, split_of, wire_of
from moe_serve.cluster.control.messages import (
    Configure,
    DropExperts,
    Join,
    Loaded,
    Report,
    ServeStep,
    StageSeconds,
    StepFailed,
    StepServed,
    TakeExperts,
    TookExperts,
)
from moe_serve.cluster.control.placement_messages import (
    DropPlacement,
    Staged,
    StagePlacement,
    SwitchPlacement,
)
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.ranks.choice_packing import unpack_needed
from moe_serve.cluster.ranks.rank_adapters import RankAdapters
from moe_serve.cluster.ranks.rank_base import RankPlacement, loaded_message, open_rank
from moe_serve.cluster.rebalance.expert_copies import ExpertCopies
from moe_serve.errors import MoeServeError
from moe_serve.model.load.load_expert_memory import MemoryBudget
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.model.stage.feed_forward import Router, choose_experts
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.frame_layout import FrameLayout
from moe_serve.pipeline.exchange.rank_services import RankServices
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.frames.frame_header import WireError
from moe_serve.pipeline.frames.wire import WireFormat
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.transfer import PeerLostError
from moe_serve.pipeline.timeline.stage_log import Operation, StageLog

_log = logging.getLogger(__name__)


class ExpertRank:
    """Holds experts (and routers, if it routes), and no state between layers."""

    def __init__(
        self,
        name: RankName,
        configure: Configure,
        progress: LoadProgress,
        tell: Callable[[Report], None],
    ) -> None:
        """`tell` may be called on another thread than the one that handles orders."""
        clock = time.monotonic()
        self._name, self._configure = name, configure
        config = configure.config
        self._model = open_rank(configure, progress)
        self._loader, self._spec = self._model.loader, self._model.spec
        layers = range(self._spec.num_layers)
        held = [configure.held.get(layer, ()) for layer in layers]
        if configure.num_slots:
            self._stage = self._loader.expert_room(held, configure.num_slots)
        else:
            self._stage = self._loader.expert_stage(held, MemoryBudget.of(config.model))
        self._placement = RankPlacement(configure.placement)
        self._copies: ExpertCopies | None = None
        if self._stage.room is not None:
            read = self._loader.live_experts().read
            self._copies = ExpertCopies(str(name), self._stage.room, read, tell)
        self._adapters: RankAdapters | None = None
        if config.adapters.is_enabled:
            self._stage.adapters = experts = VirtualExperts(self._spec.router.num_experts)
            live = LiveModel(is_routing=configure.router_on_experts)
            parts = (config.adapters, configure.adapters, self._adapter_part, live)
            self._adapters = RankAdapters(self._loader, *parts, tell, experts)
        self._routers = self._loader.routers() if configure.router_on_experts else None
        self._log = StageLog(configure.is_recording)
        self._group: DataGroup | None = None
        self._loop: ExpertLoop | None = None
        self._seconds = time.monotonic() - clock

    @property
    def loaded(self) -> Loaded:
        return loaded_message(self._model, self._seconds)

    @property
    def operation(self) -> Operation | None:
        """Returns the current operation, on any thread; None between steps."""
        return self._log.operation

    @property
    def _adapter_part(self) -> AdapterPart:
        """The experts whose adapter weights rows may need here: all experts if experts move."""
        if self._configure.config.cluster.rebalance != "off":
            return AdapterPart(has_attention=False)
        held = {layer: self._stage.held(layer) for layer in self._stage.sparse_layers}
        return AdapterPart(has_attention=False, experts=held)

    def join(self, join: Join, store: Any, host: str) -> None:
        """Enters an epoch; raises PeerLostError."""
        self.leave()
        self._placement.check(join)
        loader, configure = self._loader, self._configure
        is_routing = configure.router_on_experts
        split = split_of(join, configure, loader.device) if is_routing else None
        group = meet(join, str(self._name), store, configure, host, loader.device)
        self._group = group
        wire = wire_of(join, configure, self._spec, loader.dtype)
        layout = layout_of(group, loader.device)
        self._loop = ExpertLoop(
            group,
            self._stage,
            expert_rank=join.expert_ranks.index(str(self._name)),
            attention_ranks=join.attention_ranks,
            wire=wire,
            sparse_layers=sparse_layers(self._spec),
            route=self._route if is_routing else None,
            split=split,
            log=self._log,
            layout=layout,
            services=self._services(join, wire, layout, split),
        )
        self._placement.joined(split, self._loop.use)

    def _services(
        self, join: Join, wire: WireFormat, layout: FrameLayout, split: RowSplit | None
    ) -> RankServices | None:
        if not layout.is_direct:
            return None
        return RankServices.of(
            self._loader.kernels,
            self._stage,
            wire,
            num_ranks=len(join.expert_ranks),
            rank=join.expert_ranks.index(str(self._name)),
            router=self._spec.router,
            routers=self._routers,
            split=split,
        )

    def leave(self) -> None:
        """Closes the epoch's connections; ranks that wait for this one wake."""
        if self._loop is not None:
            self._loop.close()
        self._placement.left()
        group, self._group, self._loop = self._group, None, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Ends the rank."""
        self.leave()
        if self._adapters is not None:
            self._adapters.close()
        if self._copies is not None:
            self._copies.close()
        if self._stage.memory is not None:
            self._stage.memory.close()

    def handle(self, order: object) -> Report | None:
        """Handles one order of the coordinator; returns the answer, if there is one."""
        if isinstance(order, ServeStep):
            return self._serve(order)
        if isinstance(order, TakeExperts):
            return self._take(order)
        if isinstance(order, DropExperts):
            self._stage.drop_added()
            return TookExperts()
        if isinstance(order, StagePlacement):
            return self._prepare(order)
        if isinstance(order, DropPlacement):
            self._drop()
            return None
        if isinstance(order, SwitchPlacement):
            self._switch(order)
            return None
        if isinstance(order, LoadAdapter | DropAdapter) and self._adapters is not None:
            self._adapters.handle(order)
            return None
        raise AssertionError(f"an expert rank got {type(order).__name__}")

    def _prepare(self, order: StagePlacement) -> Staged | None:
        """Starts to read copies beside the steps; the reading thread reports when they are here."""
        self._placement.stage(order)
        if self._copies is None:  # an expert memory reads experts when rows need them
            return Staged(placement=order.placement)
        self._copies.start(order.placement, order.gained, order.bytes_per_s)
        return None

    def _drop(self) -> None:
        self._placement.drop()
        if self._copies is not None:
            self._copies.cancel()

    def _switch(self, order: SwitchPlacement) -> None:
        self._stage.own(self._placement.switch(order))

    def _serve(self, order: ServeStep) -> Report:
        self._placement.check(order)
        if self._loop is None or self._group is None or self._group.epoch != order.epoch:
            return self._failed(
                order, "it is not a member of the data group of this epoch", str(self._name)
            )
        log = self._log
        log.begin(order.step)
        rows = tuple(tuple(counts) for counts in order.rows)
        if self._stage.memory is not None:
            shape = (len(sparse_layers(self._spec)), self._spec.router.num_experts)
            self._stage.memory.hint(unpack_needed(order.needed, shape))
        try:
            self._loop.run(StepShape(order.epoch, order.step, rows, order.some_layers))
            whole = log.finish(sum(sum(counts) for counts in rows))
            return StepServed(
                epoch=order.epoch,
                step=order.step,
                failure=self._loop.failure,
                seconds=StageSeconds(whole - log.waited_s, log.waited_s, whole),
                records=log.take(),
                memory=None if self._stage.memory is None else self._stage.memory.stats,
            )
        except PeerLostError as error:
            peer, why = error.peer, str(error)
        except WireError as error:  # out of step with a peer: this epoch is over
            peer, why = str(self._name), str(error)
        self.leave()  # only now: the traceback refers to objects closed here
        return self._failed(order, why, peer)

    def _take(self, order: TakeExperts) -> TookExperts:
        try:
            for layer, experts in sorted(order.experts.items()):
                make_bank = partial(self._loader.expert_bank, layer, experts)
                self._stage.take(layer, make_bank, experts)
        except (
            MoeServeError,
            OSError,
            MemoryError,
            RuntimeError,
        ) as error:  # torch's out-of-memory
            return TookExperts(why=str(error))
        if self._adapters is not None:
            self._adapters.hold(self._adapter_part)
        return TookExperts()

    def _route(self, layer: int, x_TD: Tensor) -> RoutedRows:
        assert self._routers is not None, "this rank does not route"
        router: Router | None = self._routers[layer]
        assert router is not None, f"layer {layer} has no router"
        return choose_experts(self._loader.kernels, self._spec.router, router, x_TD)

    def _failed(self, order: ServeStep, why: str, peer: str | None) -> StepFailed:
        self._log.give_up()
        return StepFailed(epoch=order.epoch, step=order.step, why=why, peer=peer)
