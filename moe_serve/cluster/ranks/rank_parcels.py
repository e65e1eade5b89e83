"""Parcels on an attention rank: obeys the coordinator's orders on all shards of the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.transfer.parcel_memory import ParcelMemory, open_parcel_memory
from moe_serve.cache.transfer.wire_pages import WirePages, checksum
from moe_serve.cluster.control.messages import Report
from moe_serve.cluster.control.parcel_messages import (
    ExpectPages,
    ForgetPages,
    MemoryPath,
    PagesSent,
    PagesTaken,
    ParcelFacts,
    ParcelOrder,
    ParcelReport,
    ParcelSetup,
    SendPages,
    TakePages,
)
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.ranks.attention_shards import AttentionShards
from moe_serve.cluster.ranks.shard_parcels import ShardParcels
from moe_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankHome:
    """What a rank's process lends to its parts: an address of this host, the cluster's secret, and
    `tell`, which reports on any thread and raises ChannelClosedError."""

    host: str
    secret: ClusterSecret
    tell: Callable[[Report], None]


class ParcelMemories:
    """The memories that a rank's parcels pass through, opened before its shards start."""

    def __init__(self, setup: ParcelSetup) -> None:
        """Raises ConfigError if parcels cannot reach this rank."""
        self.setup = setup
        self.common: MemoryPath | None = setup.common
        if setup.common is not None:
            try:
                open_parcel_memory(setup.common.path, setup.common.token)
            except ConfigError:
                if not setup.has_port:
                    raise
                self.common = None  # another host: through the port
        self._own = ParcelMemory(2 * setup.num_bytes) if setup.has_port else None

    @property
    def own(self) -> MemoryPath | None:
        return None if self._own is None else MemoryPath(self._own.path, self._own.token)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


class RankParcels:
    """Leads the shards of a rank: each order is done by all of them before it is answered."""

    def __init__(
        self,
        memories: ParcelMemories,
        cache: KVCache,
        num_heads: int,
        shards: AttentionShards | None,
    ) -> None:
        """`num_heads`: key/value heads of the whole model."""
        self._memories, self._shards = memories, shards
        num_shards = 1 if shards is None else shards.group.shard.count
        wire = WirePages(cache, num_heads, 0, num_shards)
        self._parcels = ShardParcels(wire, memories.common, memories.own)
        self.facts = ParcelFacts(
            page_size=cache.page_size,
            page_bytes=wire.num_bytes,
            geometry=wire.geometry.hex(),
            has_memory=memories.common is not None,
        )

    def handle(self, order: ParcelOrder) -> ParcelReport | None:
        """Handles an order between two steps. Raises ShardLostError."""
        if isinstance(order, SendPages):
            return self._send(order)
        if isinstance(order, TakePages):
            return self._take(order)
        assert isinstance(order, ExpectPages | ForgetPages), f"a {type(order).__name__}"
        return None

    def close(self) -> None:
        self._memories.close()

    def _send(self, order: SendPages) -> PagesSent:
        if self._shards is not None:
            self._shards.parcel(order)
        self._parcels.save(order)
        if self._shards is not None:
            self._shards.all_set([True])
        slots = self._parcels.slots(is_common=not order.port)
        return PagesSent(ticket=order.ticket, checksum=checksum(order.slots, slots))

    def _take(self, order: TakePages) -> PagesTaken:
        if self._shards is not None:
            self._shards.parcel(order)
        why = self._parcels.load(order)
        is_sound = not why
        if self._shards is not None:
            is_sound = self._shards.all_set([is_sound])[0]
        if not is_sound:
            if self._shards is not None:
                self._shards.clear(order.pages)
            self._parcels.clear(order.pages)
            why = why or "another shard of the rank refused them"
        return PagesTaken(ticket=order.ticket, why=why)
