"""The process of one rank: connects to its coordinator, loads its part, and follows orders until it
ends.

    python -m moe_serve.cluster.ranks.rank_worker --coordinator HOST:PORT --role expert --rank 0 \\
      --host ADDRESS
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from moe_serve.cluster.control.channel import Channel, connect
from moe_serve.cluster.control.meeting_store import RemoteStore, connect_store
from moe_serve.cluster.control.messages import (
    Configure,
    Examine,
    Heartbeat,
    Hello,
    Join,
    Joined,
    Loading,
    Order,
    Report,
    RunStep,
    ServeStep,
    Stop,
    Unwell,
)
from moe_serve.cluster.control.probe import ProbePort
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.control.secret import ClusterSecret, read_secret
from moe_serve.cluster.members.preflight import examine, versions
from moe_serve.cluster.members.processes import STACKS_SIGNAL, end_with_parent
from moe_serve.cluster.ranks.attention_rank import AttentionRank
from moe_serve.cluster.ranks.attention_shards import ProcessShardStarter, ShardStarter
from moe_serve.cluster.ranks.expert_rank import ExpertRank
from moe_serve.cluster.ranks.rank_parcels import RankHome
from moe_serve.config.sources import CLUSTER_SECRET_VARIABLE
from moe_serve.engine.memory.allocator import keep_freed_memory
from moe_serve.errors import ChannelClosedError, MoeServeError
from moe_serve.pipeline.links.shard_group import ShardLostError
from moe_serve.pipeline.links.transfer import PeerLostError

CONNECT_TIMEOUT_S = 60.0
_PATIENCE_S = 3600.0  # between orders; the coordinator's end closes the channel
_LOADING_PERIOD = 64  # tensors between two reports

_log = logging.getLogger(__name__)


class Worker:
    """Runs one rank: the main thread obeys orders, and another one sends heartbeats."""

    def __init__(
        self,
        name: RankName,
        channel: Channel[Any],
        host: str,
        secret: ClusterSecret,
        shard_starter: ShardStarter | None = None,
    ) -> None:
        self._name, self._channel, self._host = name, channel, host
        self._secret = secret
        self._shard_starter = shard_starter or ProcessShardStarter()
        self._step = -1  # the last one begun
        self._num_read = 0  # tensors
        self._rank: AttentionRank | ExpertRank | None = None  # once it has loaded
        self._store: RemoteStore | None = None  # kept: groups use it
        self._ended = threading.Event()

    def run(self) -> None:
        """Runs until it is told to stop, or the coordinator is gone."""
        with ProbePort(self._host) as port:
            hello = Hello(
                name=str(self._name),
                pid=os.getpid(),
                host=self._host,
                versions=versions(),
                probe_port=port.port,
            )
            self._channel.send(hello)
            while isinstance(configure := self._next(), Examine):
                self._channel.send(examine(configure))
        if isinstance(configure, Stop):
            return  # the pre-flight found a problem
        assert isinstance(configure, Configure), f"{type(configure).__name__} before Configure"
        period_s = configure.config.cluster.heartbeat_s
        threading.Thread(target=self._beat, args=(period_s,), daemon=True).start()
        if configure.config.cells.prefill_nice:
            # On Linux this applies to this thread and those it starts, not to the heartbeat.
            os.nice(configure.config.cells.prefill_nice)
        try:
            rank = self._make(configure)
        except MoeServeError as error:
            self._channel.send(Unwell(why=str(error)))
            return
        try:
            self._serve(rank)
        except ShardLostError:
            self._channel.close()  # others need not wait for our last shard to end
            raise
        finally:
            rank.close()

    def _make(self, configure: Configure) -> AttentionRank | ExpertRank:
        if self._name.role == "expert":
            return ExpertRank(self._name, configure, self._report_loading, self._channel.send)
        home = RankHome(self._host, self._secret, self._channel.send)
        return AttentionRank(self._name, configure, self._report_loading, self._shard_starter, home)

    def _serve(self, rank: AttentionRank | ExpertRank) -> None:
        """Obeys orders until Stop. Raises ShardLostError, as a rank cannot work without its
        shards."""
        self._rank = rank
        # Until now the total was the whole model's; these are the rank's own tensors.
        self._channel.send(Loading(done=self._num_read, total=self._num_read))
        self._channel.send(rank.loaded)
        while not isinstance(order := self._next(), Stop):
            report = self._obey(rank, order)
            if report is not None:
                self._channel.send(report)

    def _obey(self, rank: AttentionRank | ExpertRank, order: object) -> Report | None:
        if isinstance(order, Join):
            return self._join(rank, order)
        if isinstance(order, RunStep | ServeStep):
            self._step = order.step
        return rank.handle(order)

    def _join(self, rank: AttentionRank | ExpertRank, order: Join) -> Joined:
        if self._store is None or self._store.is_closed:
            self._store = connect_store(
                order.store_host, order.store_port, self._secret, CONNECT_TIMEOUT_S
            )
        try:
            rank.join(order, self._store, self._host)
        except PeerLostError as error:
            why = str(error)
        else:
            return Joined(epoch=order.epoch)
        rank.leave()
        return Joined(epoch=order.epoch, why=why)

    def _next(self) -> object:
        while (order := self._channel.receive(_PATIENCE_S)) is None:
            continue
        return order

    def _beat(self, period_s: float) -> None:
        try:
            while not self._ended.wait(period_s / 2):
                self._channel.send(self._heartbeat())
        except ChannelClosedError:
            return  # the main thread sees the same error

    def _heartbeat(self) -> Heartbeat:
        operation = None if self._rank is None else self._rank.operation
        return Heartbeat(
            step=self._step,
            clock_ns=time.perf_counter_ns(),
            operation="" if operation is None else str(operation),
            operation_s=0.0 if operation is None else operation.seconds,
        )

    def _report_loading(self, done: int, total: int) -> None:
        self._num_read = done
        if done % _LOADING_PERIOD == 0:
            self._channel.send(Loading(done=done, total=total))

    def end(self) -> None:
        self._ended.set()
        self._channel.close()
        if self._store is not None:
            self._store.close()


def main(arguments: list[str] | None = None) -> int:
    """Returns exit code 0 when told to stop, 1 when the coordinator was lost."""
    parser = argparse.ArgumentParser(
        prog="moe_serve.cluster.ranks.rank_worker", description=__doc__
    )
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--role", required=True, choices=("attention", "expert"))
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--host", required=True, help="this node's address for the data plane")
    options = parser.parse_args(arguments)
    end_with_parent()
    keep_freed_memory()
    gc.freeze()  # keeps imported objects out of collections, which delay steps
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator handles Ctrl-C
    faulthandler.register(STACKS_SIGNAL, all_threads=True)  # to our output, which is read
    name = RankName(options.role, options.rank)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    host, _, port = options.coordinator.rpartition(":")
    decoder = msgspec.msgpack.Decoder(Order)
    secret = read_secret(os.environ)
    if secret is None:
        parser.error(f"{CLUSTER_SECRET_VARIABLE} is not set: give the coordinator's secret")
    channel: Channel[Any] = connect(host, int(port), secret, decoder, CONNECT_TIMEOUT_S)
    worker = Worker(name, channel, options.host, secret)
    try:
        worker.run()
    except (ChannelClosedError, ShardLostError) as error:
        _log.warning("%s", error)
        return 1
    finally:
        worker.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
