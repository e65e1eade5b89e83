"""Starts the other shards of an attention rank, as children with connected sockets."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from moe_serve.child_python import module_command
from moe_serve.cluster.ranks.attention_shard import shard_name
from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE
from moe_serve.errors import ClusterError
from moe_serve.model.stage.tensor_shard import TensorShard

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
    group kills them. They also end with their parent by themselves (parent_watch.py)."""

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
                stdin=subprocess.PIPE,  # end of file tells the shard that we are gone
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
