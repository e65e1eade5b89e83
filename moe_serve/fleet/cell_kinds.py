"""Finds the cells that a type of device can run, and how many requests each can serve.

In a steady state every sequence gets one token in a step, and an answer of O tokens ends after O
steps. So with b sequences on each of A attention ranks, n = A b / O prompts start in a step. Ranks
step together, so a step with a prompt on one rank takes as long as that rank does:

    step = (1 - min(1, n)) step without a prompt + min(1, n) step with a prompt on the busiest rank

That is the mean TPOT, and the cell serves A b / (O step) requests per second.

A cell for prompts computes A C / step tokens of prompts per second, with the largest chunk C that
the limit of the first token allows. A cell for answers has steps without a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from moe_serve.bench.figures.summary import Slo
from moe_serve.cluster.autoscale.plan_table import CellRates
from moe_serve.config.cells import CellRole
from moe_serve.errors import ConfigError
from moe_serve.fleet.demand import Bucket, Demand
from moe_serve.fleet.offer import Offer
from moe_serve.pipeline.costs.micro_batch_choice import MAX_MICRO_BATCHES
from moe_serve.pipeline.costs.step_costs import BatchLoad
from moe_serve.pipeline.costs.step_seconds import step_seconds
from moe_serve.simulate.layout import Layout
from moe_serve.simulate.simulation import MEMORY_SHARE, CostedModel

CellStyle = Literal["replica", "expert-parallel", "split"]
MAX_SEQUENCES = 512  # of an attention rank
HEADROOMS = (0.85, 0.7, 0.5)  # of the limits, as a step's time varies
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CHUNKS = (8192, 4096, 2048, 1024, 512)  # tokens of a step
_NO_LOAD = BatchLoad.decode(0, 0)
_SLOW_STEPS = 4  # a step with a full chunk may take this many times the limit of TPOT
_READING = 64  # prompts that an attention rank of a cell for prompts has at once, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKind:
    """A cell with its limits. `step_s`: the predicted TPOT, or of a cell for prompts the step that
    reads a full chunk; `capacity`: requests per second, for the mean request, of what its role does
    for them; `num_pages`: of an attention rank (None: no limit is known)."""

    offer: Offer
    model: CostedModel
    layout: Layout
    micro_batches: int
    max_num_seqs: int
    max_batched_tokens: int
    num_pages: int | None
    headroom: float
    step_s: float
    capacity: float
    role: CellRole = "both"

    @property
    def num_devices(self) -> int:
        return self.layout.num_cell_devices

    @property
    def price(self) -> float:
        """Price of the cell and hour."""
        return self.num_devices * self.offer.price

    @property
    def style(self) -> CellStyle:
        return style_of(self.layout)

    @property
    def is_served(self) -> bool:
        """True if moe-serve serves this layout."""
        is_alone = self.layout.num_cell_devices == 1 and self.role == "both"
        return self.layout.is_split or is_alone

    def rates(self, bucket: Bucket) -> CellRates:
        """Returns the tokens per second of the cell, for requests as in a bucket."""
        assert self.role != "both", "a cell that does both has no rate of one"
        if self.role == "prefill":
            return CellRates(prompt_tok_s=self.capacity * bucket.computed, output_tok_s=None)
        return CellRates(prompt_tok_s=None, output_tok_s=self.capacity * bucket.output)

    @property
    def name(self) -> str:
        return self._layout_name if self.role == "both" else f"{self._layout_name} {self.role}"

    @property
    def _layout_name(self) -> str:
        layout = self.layout
        shards = f" tp{layout.num_shards}" if layout.num_shards > 1 else ""
        if layout.is_split:
            return f"{layout.num_attention}A{layout.num_experts}E{shards} m={self.micro_batches}"
        if layout.num_attention == 1:
            return f"replica{shards}"
        overlap = f" m={self.micro_batches}" if self.micro_batches > 1 else ""
        return f"expert-parallel on {layout.num_cell_devices}{shards}{overlap}"


def style_of(layout: Layout) -> CellStyle:
    if layout.is_split:
        return "split"
    return "replica" if layout.num_attention == 1 else "expert-parallel"


def step_seconds_of(
    model: CostedModel, layout: Layout, micro_batches: int, busiest: BatchLoad, others: BatchLoad
) -> float:
    """Predicts a step in which one attention rank has the load `busiest`. See `step_time`."""
    if not layout.is_split and layout.num_attention == 1:
        return model.costs.colocated_time(busiest)
    num_others = layout.num_attention - 1
    parts = zip(busiest.split(micro_batches), others.split(micro_batches), strict=True)
    times = model.costs.layer_times([[a, *[b] * num_others] for a, b in parts], model.ranks)
    return step_seconds(times) + model.costs.fixed_seconds([busiest, others])


@dataclass(frozen=True, slots=True)
class _Sizer:
    """Finds the largest batch of a cell under the limits of latency and memory."""

    model: CostedModel
    layout: Layout
    micro_batches: int
    slo: Slo
    num_tokens: int | None  # that the KV pages of a rank hold
    role: CellRole = "both"
    _known_s: dict[tuple[int, int, int, int], float] = field(default_factory=dict)  # see `chunk_s`

    def step_s(self, bucket: Bucket, batch: int) -> float:
        """Predicts the mean step, with the prompts that start."""
        if self.role == "decode":
            return self.chunk_s(bucket, batch, 0)
        num_chunks = max(1.0, bucket.computed / _CHUNKS[0])
        num_ranks = self.layout.num_attention
        starts = num_chunks * num_ranks * batch / bucket.output
        # The busiest of several ranks has more than the mean.
        mean = starts / num_ranks
        most = max(1.0, mean + math.sqrt(2 * mean * math.log(num_ranks))) if starts > 1 else 1.0
        share = min(1.0, starts)
        rows = most * bucket.computed / num_chunks
        return share * self.chunk_s(bucket, batch, rows) + (1 - share) * self.chunk_s(
            bucket, batch, 0
        )

    def chunk_s(self, bucket: Bucket, batch: int, num_rows: float) -> float:
        """Predicts a step that decodes, and reads so many tokens of a prompt on one rank."""
        context, rows = round(bucket.prompt + bucket.output / 2), round(num_rows)
        before = round(bucket.prompt - bucket.computed)
        key = batch, context, before, rows
        seconds = self._known_s.get(key)
        if seconds is None:
            decode = BatchLoad.decode(batch, context)
            prompt = BatchLoad.of_parts([before], [rows]) if rows else _NO_LOAD
            busiest = BatchLoad.together([decode, prompt])
            seconds = self._known_s[key] = step_seconds_of(
                self.model, self.layout, self.micro_batches, busiest, decode
            )
        return seconds

    def is_fast(self, bucket: Bucket, batch: int, headroom: float) -> bool:
        step_s, slo = self.step_s(bucket, batch), self.slo
        if slo.tpot_s is not None and step_s > headroom * slo.tpot_s:
            return False
        if (slo.ttft_s is None and slo.e2e_s is None) or self.role == "decode":
            return slo.e2e_s is None or step_s * bucket.output <= headroom * slo.e2e_s
        num_chunks = -(-bucket.computed // _CHUNKS[0])
        ttft_s = step_s / 2 + num_chunks * self.chunk_s(
            bucket, batch, min(bucket.computed, _CHUNKS[0])
        )
        if slo.ttft_s is not None and ttft_s > headroom * slo.ttft_s:
            return False
        return slo.e2e_s is None or ttft_s + step_s * bucket.output <= headroom * slo.e2e_s

    def largest(self, bucket: Bucket, headroom: float) -> int:
        """Returns the largest batch of an attention rank, or 0 if not even one request fits."""
        low, high = 0, MAX_SEQUENCES
        if self.num_tokens is not None:
            high = min(high, int(self.num_tokens // bucket.tokens))
        while low < high:
            middle = (low + high + 1) // 2
            if self.is_fast(bucket, middle, headroom):
                low = middle
            else:
                high = middle - 1
        return low if low >= self.micro_batches else 0

    def chunk(self, bucket: Bucket, batch: int) -> int:
        """Returns the largest number of tokens of a step that keeps most steps within the
        limits."""
        if self.slo.tpot_s is None:
            return _CHUNKS[0]
        needed = batch * (1 + bucket.computed / bucket.output)
        limit_s = _SLOW_STEPS * self.slo.tpot_s
        fitting = [c for c in _CHUNKS if c >= needed]
        return next(
            (c for c in fitting if self.chunk_s(bucket, batch, min(bucket.computed, c)) <= limit_s),
            fitting[-1] if fitting else _CHUNKS[0],
        )

    def reading_s(self, bucket: Bucket, chunk: int) -> float:
        """Predicts a step that reads so many tokens of prompts on every rank."""
        num_prompts = max(1, round(chunk / bucket.computed))
        before = bucket.prompt - bucket.computed + max(0.0, bucket.computed - chunk) / 2
        load = BatchLoad.of_parts(
            [round(before)] * num_prompts, [chunk // num_prompts] * num_prompts
        )
        return step_seconds_of(self.model, self.layout, self.micro_batches, load, load)

    def capacity(self, bucket: Bucket, batch: int) -> float:
        num_running = self.layout.num_attention * batch
        return num_running / (bucket.output * self.step_s(bucket, batch))


def capacity_for(kind: CellKind, bucket: Bucket, slo: Slo) -> float:
    """Returns how many requests of a bucket the cell serves in a second; 0 if it is too slow."""
    sizer = _Sizer(kind.model, kind.layout, kind.micro_batches, slo, _num_tokens(kind))
    batch = min(kind.max_num_seqs, sizer.largest(bucket, kind.headroom))
    return sizer.capacity(bucket, batch) if batch else 0.0


def _num_tokens(kind: CellKind, page_size: int = 16) -> int | None:
    return None if kind.num_pages is None else kind.num_pages * page_size


def cells_with_role(offer: Offer, demand: Demand, role: CellRole) -> list[CellKind]:
    """Returns the cells of a role that fit the devices of an offer and meet the limits."""
    if role == "both":
        return [*cells_of(offer, demand)]
    return [*(prefill_cells_of if role == "prefill" else decode_cells_of)(offer, demand)]


def cells_of(offer: Offer, demand: Demand) -> Iterator[CellKind]:
    """Yields the cells of all layouts that fit the devices of an offer and meet the limits."""
    for sizer in _sizers(offer, demand, "both"):
        for headroom in HEADROOMS:
            if batch := sizer.largest(demand.whole, headroom):
                yield _kind(offer, sizer, demand, headroom, batch)


def decode_cells_of(offer: Offer, demand: Demand) -> Iterator[CellKind]:
    """Yields the cells that only generate answers."""
    for sizer in _sizers(offer, demand, "decode"):
        for headroom in HEADROOMS:
            if batch := sizer.largest(demand.whole, headroom):
                yield _kind(offer, sizer, demand, headroom, batch)


def prefill_cells_of(offer: Offer, demand: Demand) -> Iterator[CellKind]:
    """Yields the cells that only read prompts: for every layout the largest chunk that leaves half
    of the limit of the first token to the queue and the hand-over."""
    bucket, limit_s = demand.whole, demand.slo.ttft_s
    for sizer in _sizers(offer, demand, "prefill"):
        fitting = _READING if sizer.num_tokens is None else int(sizer.num_tokens // bucket.tokens)
        if fitting < 1:
            continue
        for chunk in _CHUNKS:
            step_s = sizer.reading_s(bucket, chunk)
            # A prompt waits for half a step on average, and is read in its own steps.
            first_s = (0.5 + math.ceil(bucket.computed / chunk)) * step_s
            if limit_s is None or first_s <= HEADROOMS[-1] * limit_s:
                yield replace(
                    _kind(offer, sizer, demand, HEADROOMS[-1], min(_READING, fitting)),
                    max_batched_tokens=chunk,
                    step_s=step_s,
                    capacity=sizer.layout.num_attention * chunk / step_s / bucket.computed,
                )
                break


def _sizers(offer: Offer, demand: Demand, role: CellRole) -> Iterator[_Sizer]:
    """Yields every layout that fits the devices of an offer, with every number of micro-batches."""
    for layout in layouts_of(offer):
        try:
            model, num_pages = offer.costed(layout), pages_of(offer, layout)
        except ConfigError:  # it does not fit, or it has no costs
            continue
        num_tokens = None if num_pages is None else num_pages * 16
        if num_tokens is not None and num_tokens < demand.longest:
            continue
        several = layout.is_split or layout.num_attention > 1
        for micro_batches in range(1, MAX_MICRO_BATCHES + 1 if several else 2):
            yield _Sizer(model, layout, micro_batches, demand.slo, num_tokens, role)


def _kind(offer: Offer, sizer: _Sizer, demand: Demand, headroom: float, batch: int) -> CellKind:
    bucket, num_tokens = demand.whole, sizer.num_tokens
    return CellKind(
        offer=offer,
        model=sizer.model,
        layout=sizer.layout,
        micro_batches=sizer.micro_batches,
        max_num_seqs=batch,
        max_batched_tokens=sizer.chunk(bucket, batch),
        num_pages=None if num_tokens is None else num_tokens // 16,
        headroom=headroom,
        step_s=sizer.step_s(bucket, batch),
        capacity=sizer.capacity(bucket, batch),
        role=sizer.role,
    )


def pages_of(offer: Offer, layout: Layout) -> int | None:
    """Returns the KV pages of a rank. Raises ConfigError if the weights do not fit."""
    if offer.memory_bytes is None:
        return None
    return offer.size.num_pages(layout, int(offer.memory_bytes * MEMORY_SHARE), 16)


def layouts_of(offer: Offer) -> Iterator[Layout]:
    """Yields the layouts of one cell with up to all devices of an offer."""
    most, per_node = offer.num_devices, min(offer.node_devices, 8)
    known = offer.calibrated_shards
    for num_shards in known or [1 << i for i in range(4) if 1 << i <= per_node]:
        for num_attention in _COUNTS:
            devices = num_attention * num_shards
            is_known = known is None or (num_attention, num_shards) == (1, 1)
            if devices <= most and is_known:
                yield _layout(num_attention, 0, num_shards)
            for num_experts in _COUNTS:
                if devices + num_experts <= most:
                    yield _layout(num_attention, num_experts, num_shards)


def _layout(num_attention: int, num_experts: int, num_shards: int) -> Layout:
    return Layout(
        name=f"{num_attention}A{num_experts}E" if num_experts else "colocated",
        num_cells=1,
        num_attention=num_attention,
        num_experts=num_experts,
        num_shards=num_shards,
    )
