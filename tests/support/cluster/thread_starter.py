"""Ranks as threads of the test's process: the same code and the same sockets, started at once."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import msgspec

from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.messages import Order
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.rank_starter import RankExit
from moe_serve.cluster.ranks.attention_shard import AttentionShard, make_group
from moe_serve.cluster.ranks.attention_shards import StartShard
from moe_serve.cluster.ranks.rank_worker import Worker
from moe_serve.errors import ChannelClosedError
from moe_serve.pipeline.links.shard_group import ShardGroup, ShardLostError


class ThreadShards:
    """Implements ShardStarter."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.groups: list[ShardGroup] = []

    def start(self, order: StartShard) -> None:
        group = make_group(order.rank, order.shard, order.sockets, order.timeout_s)
        self.groups.append(group)
        thread = threading.Thread(target=self._live, args=(group,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a shard does not end"

    def _live(self, group: ShardGroup) -> None:
        with contextlib.suppress(ShardLostError):
            AttentionShard(group).run()
        group.close()


class ThreadStarter:
    """Implements RankStarter. A killed rank loses its connection, and ends when it notices."""

    def __init__(self, host: str, port: int, secret: ClusterSecret, num_threads: int) -> None:
        self._host, self._port, self._secret = host, port, secret
        self._channels: dict[str, Channel[Any]] = {}
        self._threads: list[threading.Thread] = []
        self.shards: dict[str, ThreadShards] = {}

    def start(self, rank: RankName) -> None:
        decoder = msgspec.msgpack.Decoder(Order)
        channel: Channel[Any] = connect(self._host, self._port, self._secret, decoder, 60.0)
        self._channels[str(rank)] = channel
        thread = threading.Thread(target=self._live, args=(rank, channel), daemon=True)
        self._threads.append(thread)
        thread.start()

    def place_of(self, rank: RankName) -> str:
        return "this process"

    def kill(self, rank: RankName) -> None:
        self._channels[str(rank)].close()

    def exited(self) -> list[RankExit]:
        return []

    def stop(self) -> None:
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a rank does not end"

    def _live(self, rank: RankName, channel: Channel[Any]) -> None:
        shards = self.shards[str(rank)] = ThreadShards()
        worker = Worker(rank, channel, self._host, self._secret, shards)
        try:
            worker.run()
        except (ChannelClosedError, ShardLostError):
            pass
        finally:
            worker.end()
