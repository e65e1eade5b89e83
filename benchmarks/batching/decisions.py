"""Times the decisions of the scheduler with many waiting requests, for every order.

    python benchmarks/run.py decisions
    python benchmarks/run.py decisions --waiting 10000 --running 256 --json build/decisions.json

No model runs. In each round one request arrives and one ends, so one starts; in every other round
nothing happens. The times are those of the engine's thread: queueing the arrival, the schedule of
the step after the end, the schedule of a step in which nothing happened, and the end of a step
(which publishes the forecast). "none" is a server without tiers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.environment import describe_environment, write_report
from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.config.sections import OrderName, SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_terms import Service, Targets
from moe_serve.engine.schedule.policy.arrival_order import FIFO
from moe_serve.engine.schedule.prefix_sharing import PrefixSharing
from moe_serve.engine.schedule.scheduler import Scheduler
from moe_serve.engine.schedule.step_service import StepService

PAGE_SIZE, PROMPT, STEP_S = 16, 64, 0.02
WEIGHTS = {"interactive": 4.0, "normal": 2.0, "flex": 1.0}
TARGETS_S = {"interactive": 1.0, "normal": 5.0, "flex": 60.0}
TIERS = tuple(TierConfig(name=n, weight=w, ttft_s=TARGETS_S[n]) for n, w in WEIGHTS.items())
PARTS = ("arrival", "order", "event step", "idle step", "step end")


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of one part under one order."""

    order: str
    part: str
    p50_ms: float
    p99_ms: float


class Queue:
    """A scheduler with full seats and a long queue, on a clock of `STEP_S` for each step."""

    def __init__(self, order: OrderName | None, num_running: int, num_waiting: int) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_running,
            max_batched_tokens=8192,
            tiers=() if order is None else TIERS,
            order=order or "auto",
        )
        self._now, self._ids, self._rng = 0.0, itertools.count(), random.Random(0)
        cache = PrefixCache(num_running * 64, PAGE_SIZE)
        sharing = PrefixSharing(cache, b"model", lambda pages: [True] * len(pages))
        self._service = StepService.of(config, self._clock, PAGE_SIZE)
        self._scheduler = Scheduler(
            config, cache, sharing, FIFO, self._clock, service=self._service
        )
        self._num_tokens = 0
        for _ in range(num_running + num_waiting):
            self._scheduler.add(self._arrival())
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(8):  # the first steps read prompts
            self.step("idle step")
        for times in self.times.values():
            times.clear()

    def _clock(self) -> float:
        return self._now

    def _arrival(self) -> Sequence:
        number = next(self._ids)
        tier = self._rng.choices(list(WEIGHTS), (50, 30, 20))[0]
        service = Service(
            tier=tier,
            weight=WEIGHTS[tier],
            targets=Targets(ttft_s=TARGETS_S[tier]),
            tenant=f"t{number % 50}",
        )
        request = GenerationRequest(
            request_id=str(number),
            prompt_token_ids=(number, *range(PROMPT - 1)),
            params=SamplingParams(max_tokens=400),
            arrival_time=self._now,
            service=service,
        )
        return Sequence(number, request)

    def _timed(self, part: str, call: Callable[[], object]) -> object:
        begun = time.thread_time()
        result = call()
        self.times[part].append(1e3 * (time.thread_time() - begun))
        return result

    def arrive(self) -> None:
        sequence = self._arrival()
        self._timed("arrival", lambda: self._scheduler.add(sequence))

    def end_one(self) -> None:
        self._scheduler.remove([self._rng.choice(self._scheduler.running)])

    def order(self) -> None:
        if self._service is not None and self._service.queue.is_ordered:
            self._timed("order", self._service.order)

    def step(self, part: str) -> None:
        schedule: dict[int, tuple[Sequence, int]] = {}
        self._timed(part, lambda: schedule.update(self._scheduler.schedule()))
        self._now += STEP_S
        for sequence, count in schedule.values():
            self._num_tokens += sequence.num_unread(count)
            sequence.num_computed_tokens += count
            if sequence.num_pending_tokens == 0:
                sequence.append(1)
                self._num_tokens += 1
        self._timed("step end", lambda: self._scheduler.step_ended(self._num_tokens))


def measured(
    order: OrderName | None, num_running: int, num_waiting: int, num_rounds: int
) -> Iterator[Row]:
    """Time all parts under one order; None: without tiers."""
    queue = Queue(order, num_running, num_waiting)
    for _ in range(num_rounds):
        queue.arrive()
        queue.end_one()
        queue.order()
        queue.step("event step")
        queue.step("idle step")
    for part, times in queue.times.items():
        p50_ms, p99_ms = np.percentile(times or [0.0], (50, 99)).tolist()
        yield Row(order or "none", part, p50_ms, p99_ms)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    orders: tuple[OrderName | None, ...] = (None, "fifo", "priority", "edf", "atc")
    for order in orders:
        rows += measured(order, options.running, options.waiting, options.rounds)
    print(describe_environment()["cpu"])
    print(f"{options.running} running, {options.waiting} waiting: P50 / P99 in CPU milliseconds")
    print(f"{'order':10}" + "".join(f"{part:>18}" for part in PARTS))
    for order in orders:
        own = {row.part: row for row in rows if row.order == (order or "none")}
        cells = [f"{own[part].p50_ms:.3f} / {own[part].p99_ms:.3f}" for part in PARTS]
        print(f"{order or 'none':10}" + "".join(f"{cell:>18}" for cell in cells))
    write_report(options.json, {"rows": [asdict(row) for row in rows]})
