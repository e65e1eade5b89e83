"""Parcels on an attention rank: obeys the coordinator's orders on all shards of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from moe_serve.cache.transfer.parcel_memory import ParcelMemory, open_parcel_memory
from moe_serve.cache.transfer.wire_pages import WirePages, checksum
from moe_serve.cluster.control.messages import QueryPages, Report, RunStep
from moe_serve.cluster.control.parcel_messages import (
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
from moe_serve.cluster.ranks.nixl_link import NixlLink
from moe_serve.cluster.ranks.parcel_port import ParcelPort
from moe_serve.cluster.ranks.parcel_senders import ParcelSenders
from moe_serve.cluster.ranks.shard_parcels import ParcelTaker, ShardParcels
from moe_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankHome:
    """The parts of a rank's process that others use: an address of this host, the cluster's secret,
    and `tell`, which reports on any thread and raises ChannelClosedError."""

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
        has_own = setup.has_port or setup.has_agent
        self._own = ParcelMemory(2 * setup.num_bytes) if has_own else None

    @property
    def own(self) -> MemoryPath | None:
        return None if self._own is None else MemoryPath(self._own.path, self._own.token)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


class RankParcels:
    """Leads the shards of a rank: all of them carry out an order before it is answered.

    A rank of one process whose pages are in main memory takes parcels beside its steps. Others take
    them between two steps: shards must agree, and on a GPU a thread would disturb the recording of
    steps.
    """

    def __init__(
        self,
        memories: ParcelMemories,
        wire: WirePages,
        page_size: int,
        shards: AttentionShards | None,
        home: RankHome,
        computed_by: bytes,
        timeout_s: float,
    ) -> None:
        """`wire` is this process's part of pages. `computed_by` is a digest of the weights and of
        how they are computed. Raises ConfigError.
        """
        self._memories, self._shards = memories, shards
        self._parcels = ShardParcels(wire, memories.common, memories.own)
        self.facts = ParcelFacts(
            page_size=page_size,
            page_bytes=wire.num_bytes,
            geometry=wire.geometry.hex(),
            has_memory=memories.common is not None,
            host=home.host,
        )
        is_alone = shards is None and wire.is_in_main_memory
        self._taker = ParcelTaker(self._parcels, home.tell) if is_alone else None
        self._port: ParcelPort | None = None
        self._senders: ParcelSenders | NixlLink | None = None
        own = self._parcels.own
        if own is not None and memories.setup.has_agent:
            link = self._senders = NixlLink(own, timeout_s, home.tell)
            self.facts = msgspec.structs.replace(self.facts, agent=link.address, base=link.base)
        elif own is not None:
            identity = sha256(computed_by + wire.geometry).digest()
            self._port = ParcelPort(home.host, home.secret, identity, own, timeout_s, home.tell)
            self._senders = ParcelSenders(home.secret, identity, own, timeout_s, home.tell)
            self.facts = msgspec.structs.replace(self.facts, port=self._port.port)

    def before(self, order: RunStep | QueryPages) -> None:
        """Waits for the parcels that are being taken into pages that an order names."""
        if self._taker is not None and self._taker.is_busy:
            self._taker.settle(_named_pages(order))

    def handle(self, order: ParcelOrder) -> ParcelReport | None:
        """Handles an order between two steps. Raises ShardLostError."""
        if isinstance(order, SendPages):
            return self._send(order)
        if isinstance(order, TakePages):
            return self._take(order)
        assert self._port is not None, f"{type(order).__name__} for a rank without a port"
        if isinstance(order, ForgetPages):
            return self._port.forget(order)
        self._port.expect(order)
        return None

    def close(self) -> None:
        """Ends the links to other ranks, even in the middle of a parcel."""
        if self._senders is not None:
            self._senders.close()
        if self._port is not None:
            self._port.close()
        if self._taker is not None:
            self._taker.close()
        self._memories.close()

    def _send(self, order: SendPages) -> PagesSent | None:
        if self._taker is not None:
            self._taker.settle(order.pages)
        if self._shards is not None:
            self._shards.parcel(order)
        self._parcels.save(order)
        if self._shards is not None:
            self._shards.all_set([True])
        if order.is_common:
            crc = checksum(order.slots, self._parcels.slots(is_common=True))
            return PagesSent(ticket=order.ticket, checksum=crc)
        assert self._senders is not None, "a rank with slots of its own can send them"
        self._senders.send(order)  # the rest is done beside the next steps
        return None

    def _take(self, order: TakePages) -> PagesTaken | None:
        if self._taker is not None:
            self._taker.take(order)
            return None
        if self._shards is None:
            return PagesTaken(ticket=order.ticket, why=self._parcels.take(order))
        self._shards.parcel(order)
        why = self._parcels.load(order)
        if not self._shards.all_set([not why])[0]:
            self._shards.clear(order.pages)
            self._parcels.clear(order.pages)
            why = why or "another shard of the rank refused them"
        return PagesTaken(ticket=order.ticket, why=why)


def _named_pages(order: RunStep | QueryPages) -> Iterator[int]:
    """Yields the pages that an order names. A step may also use pages that earlier orders have
    named."""
    for work in order.page_work:
        yield from work.clear
        for pair in work.copy:
            yield from pair
        yield from (page for page, _ in work.save)
        yield from (page for _, page in work.load)
    if isinstance(order, QueryPages):
        yield from order.pages
        return
    for batch in order.micro_batches:
        for piece in batch:
            yield from piece.pages
