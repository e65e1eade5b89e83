"""What an expert rank does: serve steps with the experts that it holds, and take more if asked."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.routed_rows import RoutedRows
from moe_serve.cluster.epoch import layout_of, meet, sparse_layers, split_of, wire_of
from moe_serve.cluster.load_report import load_report
from moe_serve.cluster.messages import (
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
from moe_serve.cluster.rank_device import rank_device
from moe_serve.cluster.rank_name import RankName
from moe_serve.engine.build import open_loader
from moe_serve.errors import MoeServeError
from moe_serve.model.expert_choice import Router, choose_experts
from moe_serve.model.load_expert_memory import MemoryBudget
from moe_serve.model.model_tensors import LoadProgress
from moe_serve.pipeline.data_group import DataGroup
from moe_serve.pipeline.expert_loop import ExpertLoop
from moe_serve.pipeline.frame_header import WireError
from moe_serve.pipeline.stage_log import StageLog
from moe_serve.pipeline.step_shape import StepShape
from moe_serve.pipeline.transfer import PeerLostError

_log = logging.getLogger(__name__)


class ExpertRank:
    """Holds experts (and routers, if it routes), and nothing between layers."""

    def __init__(self, name: RankName, configure: Configure, progress: LoadProgress) -> None:
        clock = time.monotonic()
        self._name, self._configure = name, configure
        config, folder = configure.config, Path(configure.folder)
        device = rank_device(config.model)
        self._loader = open_loader(folder, config.model, configure.num_threads, device, progress)
        torch.set_num_threads(1 if self._loader.kernels.has_own_threads else configure.num_threads)
        self._spec = self._loader.spec
        layers = range(self._spec.num_layers)
        held = [configure.held.get(layer, ()) for layer in layers]
        self._stage = self._loader.expert_stage(held, MemoryBudget.of(config.model))
        self._routers = self._loader.routers() if configure.router_on_experts else None
        self._log = StageLog(configure.is_recording)
        self._group: DataGroup | None = None
        self._loop: ExpertLoop | None = None
        self._seconds = time.monotonic() - clock

    @property
    def loaded(self) -> Loaded:
        return load_report(self._loader, self._configure, self._seconds)

    def join(self, join: Join, store: Any, host: str) -> None:
        """Enter an epoch; raises PeerLostError."""
        self.leave()
        loader, configure = self._loader, self._configure
        is_routing = configure.router_on_experts
        group = meet(join, str(self._name), store, configure, host, loader.device)
        self._group = group
        self._loop = ExpertLoop(
            group,
            self._stage,
            expert_rank=join.expert_ranks.index(str(self._name)),
            attention_ranks=join.attention_ranks,
            wire=wire_of(join, configure, self._spec, loader.dtype),
            sparse_layers=sparse_layers(self._spec),
            route=self._route if is_routing else None,
            split=split_of(join, configure, loader.device) if is_routing else None,
            log=self._log,
            layout=layout_of(group, loader.device),
        )

    def leave(self) -> None:
        """Close the epoch's connections: whoever waits for this rank wakes."""
        if self._loop is not None:
            self._loop.close()
        group, self._group, self._loop = self._group, None, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """The rank's end."""
        self.leave()
        if self._stage.memory is not None:
            self._stage.memory.close()

    def handle(self, order: object) -> Report | None:
        """One order of the coordinator -> what to answer."""
        if isinstance(order, ServeStep):
            return self._serve(order)
        if isinstance(order, TakeExperts):
            return self._take(order)
        if isinstance(order, DropExperts):
            self._stage.drop_added()
            return TookExperts()
        raise AssertionError(f"an expert rank got {type(order).__name__}")

    def _serve(self, order: ServeStep) -> Report:
        if self._loop is None or self._group is None or self._group.epoch != order.epoch:
            return self._failed(order, "it is in no data group of this epoch", str(self._name))
        log = self._log
        log.begin(order.step)
        rows = tuple(tuple(counts) for counts in order.rows)
        try:
            self._loop.run(StepShape(order.epoch, order.step, rows))
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
        except WireError as error:  # out of step with somebody: this epoch is over
            peer, why = str(self._name), str(error)
        self.leave()  # only now: the error's traceback refers to what is closed here
        return self._failed(order, why, peer)

    def _take(self, order: TakeExperts) -> TookExperts:
        try:
            for layer, experts in sorted(order.experts.items()):
                make_bank = partial(self._loader.expert_bank, layer, experts)
                self._stage.take(layer, make_bank, experts)
        except (MoeServeError, OSError, MemoryError, RuntimeError) as error:  # torch's: no memory
            return TookExperts(why=str(error))
        return TookExperts()

    def _route(self, layer: int, x_TD: Tensor) -> RoutedRows:
        assert self._routers is not None, "this rank does not route"
        router: Router | None = self._routers[layer]
        assert router is not None, f"layer {layer} has no router"
        return choose_experts(self._loader.kernels, self._spec.router, router, x_TD)

    def _failed(self, order: ServeStep, why: str, peer: str | None) -> StepFailed:
        return StepFailed(epoch=order.epoch, step=order.step, why=why, peer=peer)
