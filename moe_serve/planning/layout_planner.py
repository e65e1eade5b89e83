"""Plans layouts for N devices: attention and expert ranks, or whole models side by side.

Only decode is planned: a step gives every sequence one token, so the time of a step is the TPOT.
The cost model predicts every split A t + E = N with 1 to 4 micro-batches and attention ranks of t
devices, for every t that was calibrated, beside one colocated device and N replicas of it, so the
answer may be that disaggregation is not worth it. For a fair comparison it also predicts the layout
of other servers: attention on each of N devices and the experts spread over the same ones.
moe-serve does not serve that layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from moe_serve.errors import ConfigError
from moe_serve.pipeline.costs.cost_model import StageCosts
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, step_time
from moe_serve.pipeline.costs.step_seconds import simulate_layers
from moe_serve.planning.calibration_file import CalibratedModel, Calibration

MAX_BATCH = 65536
MAX_DEVICES = 1024
LayoutKind = Literal["colocated", "replicated", "expert-parallel", "disaggregated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The demands on a layout. `batch`: sequences decoding at once; `rate`: tokens per second in
    all; with neither: as many as the bounds allow. `memory_bytes`: of one device."""

    num_devices: int
    context: int
    batch: int | None = None
    rate: float | None = None
    max_tpot_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout with its prediction. `reason` says why it cannot be used; empty: it can.

    Batch, throughput and step are 0 if no batch fits. Bytes are those of the fullest device of each
    kind.
    """

    kind: LayoutKind
    num_devices: int
    num_attention: int  # attention ranks, or devices that hold requests
    num_experts: int  # devices that hold experts only
    num_shards: int  # devices of each attention rank
    num_micro_batches: int
    batch: int
    step_s: float
    tokens_per_s: float
    attention_bytes: int
    expert_bytes: int
    reason: str

    @property
    def name(self) -> str:
        if self.kind == "disaggregated":
            tp = f" tp{self.num_shards}" if self.num_shards > 1 else ""
            return f"{self.num_attention}A{self.num_experts}E{tp} m={self.num_micro_batches}"
        if self.kind == "expert-parallel":
            return f"expert-parallel on {self.num_devices}"
        return "colocated, 1 device" if self.kind == "colocated" else f"{self.num_devices} replicas"

    @property
    def is_served(self) -> bool:
        """Returns True if moe-serve serves this layout."""
        return self.kind != "expert-parallel"

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.num_devices


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout before its batch is known."""

    kind: LayoutKind
    num_devices: int
    ranks: Ranks
    num_micro_batches: int
    num_shards: int = 1

    @property
    def num_holders(self) -> int:
        """Returns the number of attention ranks, or of devices that hold requests."""
        return self.ranks.num_attention

    @property
    def least_batch(self) -> int:
        """Returns the fewest sequences with which one attention rank has enough to split."""
        return (self.num_micro_batches - 1) * self.num_holders + 1

    def loads(self, batch: int, context: int) -> list[BatchLoad]:
        share, more = divmod(batch, self.num_holders)
        return [
            BatchLoad.decode(share + (rank < more), context) for rank in range(self.num_holders)
        ]

    def step_s(self, costs: StageCosts, batch: int, context: int) -> float:
        loads = self.loads(batch, context)
        if self.kind in ("colocated", "replicated"):
            return costs.colocated_time(loads[0])
        costs = costs.with_shards(self.num_shards)
        return step_time(costs, loads, self.num_micro_batches, self.ranks)

    def simulated_s(self, costs: StageCosts, batch: int, context: int) -> float:
        """Returns the time of the same step by discrete simulation."""
        loads = self.loads(batch, context)
        parts = zip(*(load.split(self.num_micro_batches) for load in loads), strict=True)
        layers = costs.with_shards(self.num_shards).layer_times(list(parts), self.ranks)
        seconds = simulate_layers(layers, self.ranks.num_attention, self.ranks.num_experts)
        return seconds + costs.fixed_seconds(loads)

    def bytes_per_device(self, model: CalibratedModel, batch: int, context: int) -> tuple[int, int]:
        """Returns the bytes of a device that holds requests, and of one that holds experts only."""
        kv = -(-batch // self.num_holders) * context * model.kv_token_bytes
        if self.kind == "disaggregated":
            kv_shards = min(self.num_shards, model.num_kv_parts)
            attention = -(-model.attention_bytes // self.num_shards) - (-kv // kv_shards)
            return attention, -(-model.expert_bytes // self.ranks.num_experts)
        if self.kind == "expert-parallel":
            share = -(-model.expert_bytes // self.num_devices)
            return model.attention_bytes + share + kv, 0
        return model.attention_bytes + model.expert_bytes + kv, 0


def plan_layouts(calibration: Calibration, request: PlanRequest) -> list[PlannedLayout]:
    """Returns all layouts, best first: most tokens per second; with a rate wanted, shortest
    steps.

    Layouts that cannot be used come last. Raises ConfigError if the request contradicts itself or
    the calibrated model.
    """
    check_request(calibration, request)
    layouts = [_planned(c, calibration, request) for c in _candidates(calibration, request)]
    if request.rate is not None:
        return sorted(layouts, key=lambda x: (bool(x.reason), x.step_s or 0.0, x.num_micro_batches))
    return sorted(layouts, key=lambda x: (bool(x.reason), -x.tokens_per_s, x.num_micro_batches))


def simulated_step_s(calibration: Calibration, layout: PlannedLayout, context: int) -> float:
    """Simulates a disaggregated layout's step, as a check on the formula."""
    assert layout.kind == "disaggregated", f"{layout.name} has no pipeline to simulate"
    ranks = Ranks(num_attention=layout.num_attention, num_experts=layout.num_experts)
    candidate = _Candidate(
        layout.kind, layout.num_devices, ranks, layout.num_micro_batches, layout.num_shards
    )
    return candidate.simulated_s(calibration.costs, layout.batch, context)


def check_request(calibration: Calibration, request: PlanRequest) -> None:
    """Raises ConfigError if the request contradicts itself or the model."""
    r, model = request, calibration.model
    if not 1 <= r.num_devices <= MAX_DEVICES:
        raise ConfigError(f"devices must be in [1, {MAX_DEVICES}], got {r.num_devices}.")
    if not 1 <= r.context <= model.max_context:
        raise ConfigError(
            f"context must be 1 to {model.max_context} tokens for {model.name}, got {r.context}."
        )
    if r.batch is not None and r.rate is not None:
        raise ConfigError("give a batch or a rate, not both: the rate decides the batch.")
    if r.batch is not None and not 1 <= r.batch <= MAX_BATCH:
        raise ConfigError(f"batch must be in [1, {MAX_BATCH}], got {r.batch}.")
    for name, value in (
        ("rate", r.rate),
        ("max-tpot-ms", None if r.max_tpot_s is None else 1e3 * r.max_tpot_s),
        ("memory-bytes", r.memory_bytes),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be greater than 0 and finite, got {value:g}.")
    if (r.batch, r.rate, r.max_tpot_s, r.memory_bytes) == (None, None, None, None):
        raise ConfigError(
            "give at least one of: a batch, a rate in tokens per second, a longest TPOT, "
            "or the memory of a device, which limits the batch."
        )


def _candidates(calibration: Calibration, request: PlanRequest) -> Iterator[_Candidate]:
    n = request.num_devices
    yield _Candidate("colocated", 1, Ranks(num_attention=1, num_experts=1), 1)
    if n > 1:
        yield _Candidate("replicated", n, Ranks(num_attention=n, num_experts=1), 1)
        yield _Candidate("expert-parallel", n, Ranks(num_attention=n, num_experts=n), 1)
    for num_experts in range(1, min(n, calibration.costs.experts.num_experts + 1)):
        for num_shards in calibration.costs.shard_counts:
            num_attention, rest = divmod(n - num_experts, num_shards)
            if rest:
                continue
            ranks = Ranks(num_attention=num_attention, num_experts=num_experts)
            for num_parts in range(1, MAX_MICRO_BATCHES + 1):
                yield _Candidate("disaggregated", n, ranks, num_parts, num_shards)


def _planned(
    candidate: _Candidate, calibration: Calibration, request: PlanRequest
) -> PlannedLayout:
    """Returns the candidate with the batch that the request leads to."""
    costs, model, context = calibration.costs, calibration.model, request.context
    least = candidate.least_batch

    def step_s(batch: int) -> float:
        return candidate.step_s(costs, batch, context)

    def is_held(batch: int) -> bool:
        limit = request.memory_bytes
        return limit is None or max(candidate.bytes_per_device(model, batch, context)) <= limit

    def is_fast(batch: int) -> bool:
        return request.max_tpot_s is None or step_s(batch) <= request.max_tpot_s

    if request.batch is not None:
        batch = request.batch if request.batch >= least else 0
    elif request.rate is not None:
        rate = request.rate
        batch = min(_first(least, lambda b: b / step_s(b) >= rate), MAX_BATCH)
    else:
        batch = _first(least, lambda b: not (is_held(b) and is_fast(b))) - 1
        batch = batch if batch >= least else 0
    used = batch or least
    reason = _reason(candidate, calibration, request, used)
    if not reason and not batch:
        assert request.batch is not None, "a batch that was not asked for is at least the least"
        reason = f"{_sequences(request.batch)} are too few: it takes {least}"
    seconds = step_s(used)
    attention_bytes, expert_bytes = candidate.bytes_per_device(model, used, context)
    return PlannedLayout(
        kind=candidate.kind,
        num_devices=candidate.num_devices,
        num_attention=candidate.num_holders,
        num_experts=candidate.ranks.num_experts if candidate.kind == "disaggregated" else 0,
        num_shards=candidate.num_shards,
        num_micro_batches=candidate.num_micro_batches,
        batch=batch,
        step_s=seconds if batch else 0.0,
        tokens_per_s=batch / seconds,
        attention_bytes=attention_bytes,
        expert_bytes=expert_bytes,
        reason=reason,
    )


def _reason(
    candidate: _Candidate, calibration: Calibration, request: PlanRequest, batch: int
) -> str:
    """Returns why this batch cannot run in this layout; empty if it can."""
    needed = max(candidate.bytes_per_device(calibration.model, batch, request.context))
    if request.memory_bytes is not None and needed > request.memory_bytes:
        return f"needs {needed / 2**30:.2f} GiB on a device for {_sequences(batch)}"
    seconds = candidate.step_s(calibration.costs, batch, request.context)
    if request.max_tpot_s is not None and seconds > request.max_tpot_s:
        return f"a step of {_sequences(batch)} takes {1e3 * seconds:.2f} ms"
    if request.rate is not None and batch / seconds < request.rate:
        return f"reaches {batch / seconds:.0f} tokens/s at most"
    return ""


def _sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


def _first(least: int, is_reached: Callable[[int], bool]) -> int:
    """Returns the smallest batch from `least` on that meets a condition; MAX_BATCH + 1 if none
    does.

    The condition must stay true above that batch. Doubles, then halves.
    """
    high = least
    while not is_reached(high):
        if high >= MAX_BATCH:
            return MAX_BATCH + 1
        high = min(2 * high, MAX_BATCH)
    low = max(least, high // 2)
    while low < high:
        middle = (low + high) // 2
        if is_reached(middle):
            high = middle
        else:
            low = middle + 1
    return high
