"""What the first shard of an attention rank tells the others: one tagged msgpack union."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from moe_serve.cluster.control.messages import QueryPages, RunStep
from moe_serve.config.sections import EngineConfig


class _Order(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Fields in order, without their names."""


class LoadShard(_Order, frozen=True):
    """The first order: which weights to load."""

    config: EngineConfig
    folder: str
    num_threads: int


class MakePages(_Order, frozen=True):
    """As many as the leader has."""

    num_pages: int


class ShardStep(_Order, frozen=True):
    """A step; `tokens`: what the one before has sampled, by sequence id."""

    tokens: Mapping[int, int]
    run: RunStep


class ShardQuery(_Order, frozen=True):
    """Which pages are finite here?"""

    query: QueryPages


class EndShard(_Order, frozen=True):
    """Leave."""


ShardOrder = LoadShard | MakePages | ShardStep | ShardQuery | EndShard

_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ShardOrder)


def pack_order(order: ShardOrder) -> bytes:
    return msgspec.msgpack.encode(order)


def unpack_order(content: bytes) -> ShardOrder:
    order: ShardOrder = _DECODER.decode(content)
    return order
