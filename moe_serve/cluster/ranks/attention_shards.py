"""The other shards of an attention rank: starts them, and speaks with them as the first shard."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_serve.child_python import module_command
from moe_serve.cluster.control.adapter_messages import DropAdapter, LoadAdapter
from moe_serve.cluster.control.messages import Configure, PageWork, QueryPages, RunStep
from moe_serve.cluster.control.parcel_messages import MemoryPath, SendPages, TakePages
from moe_serve.cluster.ranks.attention_shard import (
    EndShard,
    LoadShard,
    MakePages,
    ShardAdapter,
    ShardOrder,
    ShardParcel,
    ShardQuery,
    ShardStep,
    make_group,
    pack_order,
    shard_name,
    tell_flags,
)
from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE
from moe_serve.errors import ClusterError, ConfigError
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.tensor_shard import TensorShard, check_shards
from moe_serve.pipeline.links.shard_group import ShardGroup, ShardLostError

_FOLLOWERS_PATIENCE = 4  # the leader may wait for several ranks, for the time-out of each
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class StartShard:
    """A shard of a rank to start, and its end of the link to each other shard."""

    rank: str
    shard: TensorShard
    sockets: Mapping[int, socket.socket]
    timeout_s: float


class ShardStarter(Protocol):
    """Starts shards of one rank. The sockets belong to the shard from `start` on."""

    def start(self, order: StartShard) -> None:
        """Raises ClusterError."""
        ...

    def close(self) -> None:
        """Waits a little for their end, and then kills them."""
        ...


class ProcessShardStarter:
    """Implements ShardStarter with children in this process's group, so that killing the rank's
    group kills them. They also end with their parent by themselves (`end_with_parent`)."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, order: StartShard) -> None:
        descriptors = {index: s.fileno() for index, s in order.sockets.items()}
        links = ",".join(f"{index}:{number}" for index, number in descriptors.items())
        command = module_command(
            "moe_serve.cluster.ranks.attention_shard",
            *("--name", order.rank, "--index", str(order.shard.index)),
            *("--links", links, "--timeout", str(order.timeout_s)),
        )
        environment = {k: v for k, v in os.environ.items() if k != CLUSTER_SECRET_VARIABLE}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # end of file tells the shard that its parent is gone
                env=environment,
                pass_fds=tuple(descriptors.values()),
            )
        except OSError as error:
            name = shard_name(order.rank, order.shard.index)
            raise ClusterError(f"cannot start {name}: {error.strerror or error}.") from error
        finally:
            for connection in order.sockets.values():
                connection.close()
        self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None, "its input is a pipe"
            process.stdin.close()
        self._processes = []


class AttentionShards:
    """Starts the other shards at construction; they load while the leader does."""

    def __init__(
        self,
        rank: str,
        configure: Configure,
        starter: ShardStarter,
        common: MemoryPath | None = None,
        own: MemoryPath | None = None,
    ) -> None:
        """`common`, `own`: see `ShardParcels`."""
        cluster = configure.config.cluster
        count = cluster.attention_tp
        self._rank, self._starter = rank, starter
        self._start_timeout_s = cluster.start_timeout_s
        ends = _mesh(count)
        patience_s = _FOLLOWERS_PATIENCE * cluster.timeout_s
        for index in range(1, count):
            shard = TensorShard(index, count)
            starter.start(StartShard(rank, shard, ends[index], patience_s))
        self.group: ShardGroup = make_group(rank, TensorShard(0, count), ends[0], cluster.timeout_s)
        self._tokens: Mapping[int, Sequence[int]] = {}
        load = LoadShard(
            config=configure.config,
            folder=configure.folder,
            num_threads=configure.num_threads,
            arena=configure.arena,
            common=common,
            own=own,
            adapters=configure.adapters,
        )
        self._order(load)

    def make_pages(self, num_pages: int) -> None:
        """Makes their part of the cache; waits until all have loaded. Raises ShardLostError."""
        self._order(MakePages(num_pages=num_pages))
        for index in range(1, self.group.shard.count):
            if not self.group.has_message(index, self._start_timeout_s):
                name = shard_name(self._rank, index)
                raise ShardLostError(f"{name} did not load in {self._start_timeout_s:g} s")
        tell_flags(self.group, [True])

    def step(self, run: RunStep) -> None:
        """Makes them compute the step too, in lockstep with the leader."""
        tokens, self._tokens = self._tokens, {}
        self._order(ShardStep(tokens=tokens, run=run))

    def sampled(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Keeps the step's tokens, which go out with the next step."""
        self._tokens = tokens

    def query(self, query: QueryPages) -> None:
        """Asks them for pages that are not finite; `all_set` collects the answers."""
        self._order(ShardQuery(query=query))

    def parcel(self, order: SendPages | TakePages) -> None:
        """Makes them do their part of a parcel. `all_set` collects which ones succeeded."""
        self._order(ShardParcel(order=order))

    def clear(self, pages: Sequence[int]) -> None:
        """Makes them zero some pages."""
        self.query(QueryPages(page_work=(PageWork(clear=pages),), pages=()))
        self.all_set([])

    def adapter(self, order: LoadAdapter | DropAdapter) -> None:
        """Makes them load or drop an adapter. They read beside their steps and do not answer: a
        step that needs the adapter waits for it."""
        self._order(ShardAdapter(order=order))

    def all_set(self, flags: list[bool]) -> list[bool]:
        """Returns where all shards' flags are set."""
        return tell_flags(self.group, flags)

    def close(self) -> None:
        """Ends the shards."""
        with contextlib.suppress(ShardLostError):
            self._order(EndShard())
        self.group.close()
        self._starter.close()

    def _order(self, order: ShardOrder) -> None:
        self.group.order(pack_order(order))


def check_can_split(loader: ModelLoader, count: int, *, has_adapters: bool = False) -> None:
    """Raises ConfigError if the model or the kernels do not allow `count` shards."""
    check_shards(loader.spec, count)
    if count > 1 and has_adapters and loader.spec.attention.qk_norm == "row":
        raise ConfigError(
            f"cluster.attention_tp is {count}, but adapters of a model that norms the queries of "
            "all heads together are not divided among shards: use more attention ranks, or serve "
            "without --enable-lora."
        )
    if count > 1 and not loader.kernels.can_split_columns:
        raise ConfigError(
            f"cluster.attention_tp is {count}, which needs the native kernels "
            "(model.kernels; on a CPU, in float32 or bfloat16). The kernels here are "
            f"{loader.kernels.name}, whose results may depend on how many columns are "
            "computed together."
        )


def _mesh(count: int) -> list[dict[int, socket.socket]]:
    """Connects every two shards by a pair of sockets; returns each shard's ends, by the other
    shard."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for a, b in itertools.combinations(range(count), 2):
        ends[a][b], ends[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ends
