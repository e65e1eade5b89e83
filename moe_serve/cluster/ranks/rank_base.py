"""The parts that attention ranks and expert ranks share: opening the model, reporting that it has
loaded, and the placement by which a rank serves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from moe_serve.cache.page_key import model_identity
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.messages import Configure, Join, Loaded, RunStep, ServeStep
from moe_serve.cluster.control.placement_messages import StagePlacement, SwitchPlacement
from moe_serve.config.sections import ModelConfig
from moe_serve.engine.opened_model import AttentionPart, OpenedModel, device_of
from moe_serve.model.load.weight_reader import LoadProgress
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.links.nccl_link import gpu_of


def rank_device(config: ModelConfig) -> torch.device:
    """Chooses the device before anything is loaded; raises ConfigError.

    A rank sees one GPU, which its starter has chosen (members/rank_starter.py). If it sees more, it
    takes the first.
    """
    device = device_of(config)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    return device


def open_rank(configure: Configure, progress: LoadProgress) -> OpenedModel:
    """Opens the rank's checkpoint on its device, and sets torch's number of threads."""
    config, folder = configure.config.model, Path(configure.folder)
    device = rank_device(config)
    model = OpenedModel.open(folder, config, configure.num_threads, device, progress)
    model.set_torch_threads()
    return model


def loaded_message(
    model: OpenedModel,
    seconds: float,
    part: AttentionPart | None = None,
    num_shards: int = 1,
    pages: WirePages | None = None,
) -> Loaded:
    """Returns the message that the rank is ready, with its checkpoint's hash. On attention ranks,
    `part` is that of the first shard, and `pages` the form of a page of all shards. Expert ranks
    have no pages.
    """
    report = model.report(part)
    if pages is not None:
        report = replace(report, page_bytes=pages.num_bytes, page_geometry=pages.geometry.hex())
    return Loaded(
        weights_hash=model_identity(model.folder).hex(),
        report=replace(report, kv_bytes=report.kv_bytes * num_shards),
        load_seconds=seconds,
        gpu=gpu_of(model.loader.device),
    )


UseSplit = Callable[[RowSplit], None]


class RankPlacement:
    """Holds a version, and the split of rows among expert ranks if this rank sends rows.

    Orders are handled one after the other, so between two of them there is one version, which the
    steps use.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._split: RowSplit | None = None  # None: in no epoch, or other ranks split
        self._use: UseSplit | None = None
        self._staged: StagePlacement | None = None
        self._staged_split: RowSplit | None = None

    def joined(self, split: RowSplit | None, use: UseSplit) -> None:
        """Notes a new epoch, whose rows `split` divides; `use` hands a split to whatever divides
        them."""
        assert self._staged is None, f"an epoch begins while {self._staged} is staged"
        self._split, self._use = split, use

    def left(self) -> None:
        """Notes that the rank is in no epoch. The staged placement may still be switched to: the
        coordinator may not know yet."""
        self._split = self._use = self._staged_split = None

    def stage(self, order: StagePlacement) -> None:
        """Stages a placement. Its tables are made here, so that the switch takes no time."""
        self._staged = order
        if self._split is not None:
            self._staged_split = self._split.with_layers(order.ranks_of)

    def drop(self) -> None:
        """Drops the staged placement."""
        self._staged = self._staged_split = None

    def switch(self, order: SwitchPlacement) -> Mapping[int, Collection[int]]:
        """Switches to the staged placement; returns what the rank holds in the layers that
        change."""
        staged, split, use = self._staged, self._staged_split, self._use
        assert staged is not None and staged.placement == order.placement, (
            f"placement {order.placement} was not staged: {staged}"
        )
        if split is not None and use is not None:
            use(split)
            self._split = split
        self.version = order.placement
        self.drop()
        return staged.held

    def check(self, order: RunStep | ServeStep | Join) -> None:
        """Asserts that a step or an epoch has this placement, so that no step mixes two
        placements.
        """
        assert order.placement == self.version, (
            f"{type(order).__name__} of placement {order.placement}, this rank has {self.version}"
        )
