"""A shard of an attention rank other than the first: runs the same steps with its own heads.

python -m moe_serve.cluster.ranks.attention_shard --name attention-0 --index 1 --links 0:7,2:8
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from experts.virtual_experts import MissingAdapterError
from moe_serve.cache.kv_cache import KVCache, checked_kv_form
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.adapter_messages import DropAdapter, LoadAdapter
from moe_serve.cluster.control.messages import QueryPages, RunStep
from moe_serve.cluster.control.parcel_messages import MemoryPath, SendPages, TakePages
from moe_serve.cluster.members.processes import end_with_parent
from moe_serve.cluster.ranks.mirror import Mirrors, RankPages
from moe_serve.cluster.ranks.rank_adapters import RankAdapters, attention_adapters
from moe_serve.cluster.ranks.shard_parcels import ShardParcels
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.opened_model import OpenedModel, device_of
from moe_serve.errors import MoeServeError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.tensor_shard import TensorShard
from moe_serve.pipeline.links.shard_group import (
    FollowerTransport,
    ShardGroup,
    ShardLostError,
    StepAbandonedError,
)
from moe_serve.pipeline.links.shared_link import SharedLink
from moe_serve.pipeline.pipeline import Pipeline


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Encodes the fields in order, without their names."""


class LoadShard(_Order, frozen=True):
    """The first order: which weights to load."""

    config: EngineConfig
    folder: str
    num_threads: int
    arena: str = ""  # path of the memory tier
    common: MemoryPath | None = None  # for parcels, see `ShardParcels`
    own: MemoryPath | None = None
    adapters: Sequence[LoadAdapter] = ()


class MakePages(_Order, frozen=True):
    """Tells the shard to make as many pages as the leader has."""

    num_pages: int


class ShardStep(_Order, frozen=True):
    """A step; `tokens`: the runs of tokens sampled in the step before, by sequence id."""

    tokens: Mapping[int, Sequence[int]]
    run: RunStep


class ShardQuery(_Order, frozen=True):
    """Asks which pages are finite on this shard."""

    query: QueryPages


class ShardParcel(_Order, frozen=True):
    """Makes the shard do its part of a parcel, and report whether it succeeded."""

    order: SendPages | TakePages


class ShardAdapter(_Order, frozen=True):
    """Tells the shard to load an adapter beside its steps, or to drop it."""

    order: LoadAdapter | DropAdapter


class EndShard(_Order, frozen=True):
    """Tells the shard to exit."""


ShardOrder = LoadShard | MakePages | ShardStep | ShardQuery | ShardParcel | ShardAdapter | EndShard

_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ShardOrder)


def pack_order(order: ShardOrder) -> bytes:
    return msgspec.msgpack.encode(order)


def unpack_order(content: bytes) -> ShardOrder:
    order: ShardOrder = _DECODER.decode(content)
    return order


_log = logging.getLogger(__name__)


class AttentionShard:
    """Follows the orders of the first shard until that ends."""

    def __init__(self, group: ShardGroup) -> None:
        self._group, self._mirrors = group, Mirrors()

    def run(self) -> None:
        """Loads, and then runs step after step. Raises ShardLostError, or the error of loading."""
        load = self._next()
        if isinstance(load, EndShard):
            return
        assert isinstance(load, LoadShard), f"{type(load).__name__} before LoadShard"
        config, device = load.config.model, device_of(load.config.model)
        model = OpenedModel.open(Path(load.folder), config, load.num_threads, device)
        model.set_torch_threads()
        stage = model.loader.attention_stage(model.max_model_len, self._group)
        pages = self._next()
        if isinstance(pages, EndShard):
            return
        assert isinstance(pages, MakePages), f"{type(pages).__name__} before MakePages"
        page_size, dtype = load.config.cache.page_size, model.loader.dtype
        form = checked_kv_form(load.config.cache, stage.spec)
        cache = KVCache(stage.spec, pages.num_pages, page_size, dtype, device, form)
        shard = self._group.shard
        adapters = self._adapters(load, model.loader, stage)
        transport = FollowerTransport(self._group)
        pipeline = Pipeline(stage, transport, cache, device, adapters=adapters)
        num_heads = model.loader.spec.attention.num_kv_heads
        wire = WirePages(cache, num_heads, shard.index, shard.count)
        rank_pages = RankPages(cache, load.arena, wire)
        parcels = ShardParcels(wire, load.common, load.own)
        self._tell([True])  # ready
        while not isinstance(order := self._next(), EndShard):
            if isinstance(order, ShardAdapter):
                assert adapters is not None, "this shard has no adapters"
                adapters.handle(order.order)
            elif isinstance(order, ShardStep):
                self._step(order, pipeline, rank_pages)
            elif isinstance(order, ShardParcel):
                self._tell([_has_done(parcels, order)])
            else:
                assert isinstance(order, ShardQuery), f"an unexpected {type(order).__name__}"
                rank_pages.do(order.query.page_work)
                self._tell(cache.finite(list(order.query.pages)))

    def _adapters(
        self, load: LoadShard, loader: ModelLoader, stage: AttentionStage
    ) -> RankAdapters | None:
        parts = (load.adapters, stage, self._group)
        return attention_adapters(loader, load.config.adapters, *parts, tell=lambda report: None)

    def _step(self, order: ShardStep, pipeline: Pipeline, pages: RankPages) -> None:
        self._mirrors.append(order.tokens)
        plan = self._mirrors.update(order.run)
        pages.do(order.run.page_work)
        if not plan.micro_batches:
            return
        try:
            pipeline.run(plan)
        except (StepAbandonedError, MissingAdapterError):
            return  # the leader reports the reason, because it lacks the same adapters

    def _next(self) -> ShardOrder:
        return unpack_order(self._group.next_order())

    def _tell(self, flags: list[bool]) -> None:
        tell_flags(self._group, flags)


def _has_done(parcels: ShardParcels, parcel: ShardParcel) -> bool:
    if isinstance(parcel.order, TakePages):
        return not parcels.load(parcel.order)
    parcels.save(parcel.order)
    return True


def tell_flags(group: ShardGroup, flags: list[bool]) -> list[bool]:
    """Sends this shard's flags to the first shard, which learns where all shards' flags are set."""
    column = torch.tensor(flags, dtype=torch.uint8)[:, None]
    everybody = group.at_leader(column, (1,) * group.shard.count)
    return [bool(row.all()) for row in everybody]


def shard_name(rank: str, index: int) -> str:
    """Returns `attention-0.1`; the first shard has its rank's own name."""
    return f"{rank}.{index}" if index else rank


def make_group(
    rank: str, shard: TensorShard, sockets: Mapping[int, socket.socket], timeout_s: float
) -> ShardGroup:
    """Makes a shard group over connected sockets, keyed by the other shards' numbers."""
    links = {
        index: SharedLink(shard_name(rank, index), connection, timeout_s)
        for index, connection in sockets.items()
    }
    return ShardGroup(shard_name(rank, shard.index), shard, links)


def main(arguments: list[str] | None = None) -> int:
    """Returns exit code 0 when told to end, 1 when another shard was lost, 2 when it cannot
    serve."""
    parser = argparse.ArgumentParser(
        prog="moe_serve.cluster.ranks.attention_shard", description=__doc__
    )
    parser.add_argument("--name", required=True, help="name of the attention rank")
    parser.add_argument("--index", required=True, type=int)
    parser.add_argument("--links", required=True, help="SHARD:DESCRIPTOR,...")
    parser.add_argument("--timeout", required=True, type=float)
    options = parser.parse_args(arguments)
    end_with_parent()
    gc.freeze()  # as in worker.py
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles Ctrl-C
    pairs = [pair.split(":") for pair in options.links.split(",")]
    sockets = {int(index): socket.socket(fileno=int(number)) for index, number in pairs}
    shard = TensorShard(options.index, len(sockets) + 1)
    name = shard_name(options.name, shard.index)
    logging.basicConfig(level=logging.WARNING, format=f"[{name}] %(levelname)s %(message)s")
    group = make_group(options.name, shard, sockets, options.timeout)
    try:
        AttentionShard(group).run()
    except ShardLostError as error:
        _log.info("%s", error)
        return 1
    except MoeServeError as error:
        _log.error("%s", error)
        return 2
    finally:
        group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
