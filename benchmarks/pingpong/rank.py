"""Runs one rank of the pair in a separate process: reads a RankJob and Series, writes StepMarks.

It uses the server's own pipeline, transport and expert loop. Only the coordinator is missing: both
ranks read from the Series which rows a step exchanges.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cluster.control.meeting_store import StoreServer, connect_store
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.config.sections import CacheConfig
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.step_inputs import StepInputs
from moe_serve.model.step_plan import MicroBatch, SequenceSlice
from moe_serve.pipeline.exchange.expert_loop import ExpertLoop
from moe_serve.pipeline.exchange.group_transport import GroupTransport
from moe_serve.pipeline.exchange.rank_services import RankServices
from moe_serve.pipeline.exchange.row_split import RowSplit
from moe_serve.pipeline.exchange.step_shape import StepShape
from moe_serve.pipeline.frames.wire import WireFormat, make_wire_format
from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.shared_link import SharedLink
from moe_serve.pipeline.links.transfer import Transfer
from moe_serve.pipeline.pipeline import Pipeline
from moe_serve.pipeline.rank_turns import RankTurns
from moe_serve.pipeline.route_tap import RouteTap
from moe_serve.pipeline.timeline.stage_log import StageLog

from .job import RankJob, Series, StepMarks

_NAMES = {"attention": "attention-0", "expert": "expert-0"}
_TIMEOUT_S = 60.0
_CLONE_NEWNET = 0x40000000


class PairRank(ABC):
    """The common part of both ranks."""

    def __init__(self, job: RankJob) -> None:
        self.job = job
        self.loader = ModelLoader(Path(job.model), num_threads=1)
        torch.set_num_threads(1)
        self.spec = self.loader.spec
        self.layers = [i for i, layer in enumerate(self.spec.layers) if layer.is_sparse]
        secret = ClusterSecret(job.secret)
        self._store = connect_store(job.store_host, job.store_port, secret, _TIMEOUT_S)

    def serve(self, series: Series) -> list[StepMarks]:
        """Runs a series of steps together with the other rank."""
        me = _NAMES[self.job.role]
        group = TimedGroup(
            list(_NAMES.values()),
            me,
            [name for name in _NAMES.values() if name != me],
            self._store,
            epoch=series.epoch,
            host=self.job.host,
            timeout_s=_TIMEOUT_S,
            device=torch.device("cpu"),
            delay_s=series.delay_s,
        )
        group.forget()
        group.is_timed = series.is_timed
        try:
            return list(self.take_steps(group, series))
        finally:
            group.close()

    def wire(self) -> WireFormat:
        return make_wire_format(self.spec.width, self.spec.router.top_k, self.loader.dtype, 1)

    @abstractmethod
    def take_steps(self, group: TimedGroup, series: Series) -> Iterator[StepMarks]:
        """Runs the steps of a series on this side of the pair."""


class AttentionOfPair(PairRank):
    """Repeats decode steps of sequences that all have `context` tokens."""

    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        self._stage = self.loader.attention_stage(job.context)
        page_size = CacheConfig().page_size
        self._pages = -(-job.context // page_size)  # of one sequence
        num_pages = 1 + job.max_rows * self._pages
        device = torch.device("cpu")
        self._cache = KVCache(self.spec, num_pages, page_size, self.loader.dtype, device)

    @torch.inference_mode()
    def take_steps(self, group: TimedGroup, series: Series) -> Iterator[StepMarks]:
        split = RowSplit({}, 1)
        transport = GroupTransport(
            group,
            attention_rank=0,
            expert_ranks=[_NAMES["expert"]],
            wire=self.wire(),
            split=split,
            sparse_layers=self.layers,
            log=StageLog(),
        )
        log, tap = StageLog(), RouteTap(self.spec.router.num_experts)
        pipeline = Pipeline(self._stage, transport, self._cache, torch.device("cpu"), log, tap)
        if not series.is_parted:
            pipeline.turns = RankTurns.of(self._stage, self._cache, transport, log, tap)
        inputs = {tuple(rows): self._inputs(rows) for rows in series.steps}
        for step, rows in enumerate(series.steps):
            group.forget()
            transport.begin(StepShape(series.epoch, step, (tuple(rows),)))
            yield self._take_step(pipeline, group, inputs[tuple(rows)], series.is_counted)
        transport.close()

    def _take_step(
        self,
        pipeline: Pipeline,
        group: TimedGroup,
        inputs: Sequence[StepInputs],
        is_counted: bool,
    ) -> StepMarks:
        start = time.monotonic_ns()
        with Meter(is_counted) as meter:
            passed = pipeline.pass_layers(inputs)
        end = time.monotonic_ns()
        for x_TD, each in zip(passed, inputs, strict=True):
            self._stage.logits(x_TD, each.logit_rows).argmax(dim=1)
        whole_end = time.monotonic_ns()
        return StepMarks(
            start=start,
            end=end,
            whole_end=whole_end,
            received=group.received,
            sent=group.sent,
            cpu=meter.cpu,
            num_calls=meter.num_calls,
        )

    def _inputs(self, rows: Sequence[int]) -> list[StepInputs]:
        assert sum(rows) <= self.job.max_rows, f"{sum(rows)} rows for {self.job.max_rows} tables"
        first, inputs = 0, []
        for count in rows:
            batch = MicroBatch(tuple(self._slice(i) for i in range(first, first + count)))
            inputs.append(self._stage.make_inputs(batch, self._cache, torch.device("cpu")))
            first += count
        return inputs

    def _slice(self, index: int) -> SequenceSlice:
        first = 1 + index * self._pages
        tokens = np.array([(7 * index + 3) % self.spec.vocab_size], dtype=np.int64)
        pages = tuple(range(first, first + self._pages))
        return SequenceSlice(index, self.job.context - 1, tokens, pages, 1)


class ExpertOfPair(PairRank):
    def __init__(self, job: RankJob) -> None:
        super().__init__(job)
        self._stage = self.loader.expert_stage()

    def take_steps(self, group: TimedGroup, series: Series) -> Iterator[StepMarks]:
        loop = ExpertLoop(
            group,
            self._stage,
            expert_rank=0,
            attention_ranks=[_NAMES["attention"]],
            wire=self.wire(),
            sparse_layers=self.layers,
            log=StageLog(),
            services=None if series.is_parted else self._services(),
        )
        for step, rows in enumerate(series.steps):
            group.forget()
            start = time.monotonic_ns()
            with Meter(series.is_counted) as meter:
                loop.run(StepShape(series.epoch, step, (tuple(rows),)))
            end = time.monotonic_ns()
            yield StepMarks(
                start=start,
                end=end,
                whole_end=end,
                received=group.received,
                sent=group.sent,
                cpu=meter.cpu,
                num_calls=meter.num_calls,
            )
        loop.close()

    def _services(self) -> RankServices | None:
        return RankServices.of(
            self.loader.kernels,
            self._stage,
            self.wire(),
            num_ranks=1,
            rank=0,
            router=self.spec.router,
            routers=None,
            split=None,
        )


class Meter:
    """Measures the CPU time of this thread in a block, and counts its calls from Python."""

    def __init__(self, is_counting: bool) -> None:
        self._is_counting, self._begin = is_counting, 0
        self.cpu = self.num_calls = 0

    def __enter__(self) -> Meter:
        self._begin = time.thread_time_ns()
        if self._is_counting:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.cpu = time.thread_time_ns() - self._begin

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.num_calls += event in ("call", "c_call")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    job = RankJob(**json.loads(sys.stdin.readline()))
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})  # before there are other threads
    if job.network is not None:
        _enter(job.network)
    if not job.store_port:
        store = StoreServer(job.store_host, 0, ClusterSecret(job.secret), _TIMEOUT_S)
        job = replace(job, store_port=store.port)
        _send(replies, {"store_port": job.store_port})
    rank = (AttentionOfPair if job.role == "attention" else ExpertOfPair)(job)
    _send(replies, {"num_layers": len(rank.layers), "row_bytes": rank.wire().row_bytes})
    for line in sys.stdin:
        marks = rank.serve(Series(**json.loads(line)))
        _send(replies, [asdict(step) for step in marks])


def _enter(network: str) -> None:
    """Moves this thread, and those that it starts later, into a network namespace of `ip`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open("rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace.name)


def _send(replies: Any, message: object) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


@dataclass(frozen=True, slots=True)
class _TimedReceive:
    """Implements Transfer, and records when a message arrived."""

    inner: Transfer
    received: list[int]

    def wait(self) -> None:
        self.inner.wait()
        self.received.append(time.monotonic_ns())


class TimedGroup(DataGroup):
    """A data group that records the times of its messages.

    `received` and `sent` are times in ns, in the order of the exchanges.
    """

    received: list[int]
    sent: list[int]
    is_timed = True

    def forget(self) -> None:
        """Drops the recorded times before a new step."""
        self.received, self.sent = [], []

    def send(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        transfer = super().send(peer, buffer, tag, operation)
        self.sent.append(time.monotonic_ns())
        return transfer

    def receive(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        return _TimedReceive(super().receive(peer, buffer, tag, operation), self.received)

    def shared_links(self, peers: Sequence[str]) -> list[SharedLink] | None:
        """Returns None if times are noted: a native call with all links would exchange without this
        group's clock."""
        return None if self.is_timed else super().shared_links(peers)


if __name__ == "__main__":
    main()
