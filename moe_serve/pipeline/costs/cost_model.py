"""Costs of a layer's stages, as linear models of the work they do.

Linear models t = alpha + beta x describe products and transfers well (FinDEP, arXiv 2512.21487,
reports R^2 of 0.99 and more). Decode reads weights rather than multiplies: an expert layer's time
follows the bytes of the *activated* experts, so their number is a separate term. Of E experts, B
rows with k choices each touch E (1 - (1 - k/E)^B). Two halves of a batch touch more experts than
the whole, which is why splitting can be slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepTiming
from moe_serve.pipeline.costs.step_seconds import LayerTimes
from moe_serve.pipeline.costs.whole_step import LayoutStep, WholeStep, busiest

HEADER_BYTES = 64  # of a message
_CHOICE_BYTES = 8  # an expert's number and its weight
_PARTIAL_BYTES = 8  # one value of a partial sum that is added to other ranks' sums
_SUM_BYTES = 4  # one value of the complete sum, when one rank has all experts


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line: t = alpha + beta x, in seconds."""

    alpha_s: float
    beta_s: float

    def seconds(self, x: float) -> float:
        return self.alpha_s + self.beta_s * x


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """T_a, the time of one layer's attention stage.

    `row_s`: projections and router, per row; `kv_token_s`: reading one cached token; `pair_s`:
    multiplying one row with one cached token; `spill_s`: extra time for each token beyond
    `spill_tokens`, where the data read no longer fits into the processor's caches.
    """

    alpha_s: float
    row_s: float
    kv_token_s: float
    pair_s: float
    spill_s: float = 0.0
    spill_tokens: int = 0

    def seconds(self, load: BatchLoad) -> float:
        """Returns the stage's seconds; 0 without rows."""
        if not load.num_rows:
            return 0.0
        return (
            self.alpha_s
            + self.row_s * load.num_rows
            + self.kv_token_s * load.num_kv_tokens
            + self.pair_s * load.num_pairs
            + self.spill_s * max(0, load.num_kv_tokens - self.spill_tokens)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCost:
    """T_e, the time of one layer's expert stage.

    `choice_s`: one row times one expert; `expert_s`: reading one activated expert's weights.
    """

    alpha_s: float
    choice_s: float
    expert_s: float

    def seconds(self, num_choices: float, num_activated: float) -> float:
        return self.alpha_s + self.choice_s * num_choices + self.expert_s * num_activated


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Consecutive layers that cost the same. `experts` is None for dense layers."""

    num_layers: int
    attention: AttentionCost
    experts: ExpertCost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The model's experts, as the cost model needs them.

    `num_effective`: the number of equally popular experts that would give the measured number of
    activated experts. A real router prefers some experts, so it is less than `num_experts`.
    """

    num_experts: int
    top_k: int
    num_effective: float

    def num_activated(self, num_rows: float) -> float:
        """Returns the expected number of experts, among all, that `num_rows` rows activate."""
        if num_rows <= 0:
            return 0.0
        missed = math.pow(1 - min(1.0, self.top_k / self.num_effective), num_rows)
        return self.num_effective * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """Costs of exchanging one micro-batch's rows of one layer between two ranks, by message size.

    `attention`, `experts`: time the ranks themselves spend on sending and receiving, during which
    they compute nothing; `transfer`: T_c, the travel time of one message.
    """

    attention: Line
    experts: Line
    transfer: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedAttention:
    """T_a of attention ranks of several processes, which exchange their parts of each layer: the
    mean of all layers."""

    num_shards: int
    attention: AttentionCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """All constants of one model on one machine, as a calibration found them. Implements StepCosts.

    `fixed`: scheduling, head and greedy sampling of a step, by rows; `sampling`: the extra time of
    drawing by temperature. `whole`: one process with all experts; None in calibrations of earlier
    versions. `sharded`, `layouts`: attention ranks of several processes, and layouts whose ranks
    shared the machine, as far as they were measured.
    """

    layers: tuple[LayerCosts, ...]
    experts: Experts
    row_bytes: int  # bytes of one row sent to the experts, without its choices
    width: int
    link: LinkCosts
    fixed: Line
    sampling: Line
    whole: WholeStep | None = None
    sharded: tuple[ShardedAttention, ...] = ()
    layouts: tuple[LayoutStep, ...] = ()

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def version(self) -> int:
        """Returns 0, because a calibration does not change."""
        return 0

    def observe(self, loads: Sequence[BatchLoad], num_parts: int, timing: StepTiming) -> None:
        """Does nothing, because a calibration does not learn."""

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """The numbers of processes of an attention rank that were measured."""
        return (1, *sorted(each.num_shards for each in self.sharded))

    def with_shards(self, num_shards: int) -> StageCosts:
        """Returns the costs with attention ranks of this many processes, one of `shard_counts`."""
        if num_shards == 1:
            return self
        cost = next(each.attention for each in self.sharded if each.num_shards == num_shards)
        return replace(self, layers=tuple(replace(x, attention=cost) for x in self.layers))

    def layout_step(
        self, attention_ranks: int, expert_ranks: int, attention_tp: int
    ) -> LayoutStep | None:
        """Returns the steps of a layout, if it was measured."""
        wanted = (attention_ranks, expert_ranks, attention_tp)
        for each in self.layouts:
            if (each.attention_ranks, each.expert_ranks, each.attention_tp) == wanted:
                return each
        return None

    def layout_seconds(self, step: LayoutStep, loads: Sequence[BatchLoad]) -> float:
        """Predicts a step of a measured layout from the loads of its attention ranks."""
        activated = self.experts.num_activated(sum(load.num_rows for load in loads))
        return step.whole.seconds(busiest(loads), activated)

    def handling_seconds(self, load: BatchLoad) -> float:
        """Predicts how long the only attention rank of a layout is busy with the messages of a step
        to and from the only expert rank."""
        num_sparse = sum(layer.num_layers for layer in self.layers if layer.experts is not None)
        return num_sparse * self._traffic([load], _ALONE).attention_s

    def layer_times(
        self, micro_batches: Sequence[Sequence[BatchLoad]], ranks: Ranks
    ) -> tuple[LayerTimes, ...]:
        """See `StepCosts.layer_times`."""
        traffic = [self._traffic(loads, ranks) for loads in micro_batches]
        work = [self._expert_work(sum(x.num_rows for x in loads), ranks) for loads in micro_batches]
        nothing = (0.0,) * len(micro_batches)
        times = []
        for layer in self.layers:
            own = tuple(
                max([layer.attention.seconds(load) for load in loads]) for loads in micro_batches
            )
            if (cost := layer.experts) is None:
                attention_s, experts_s, transfer_s = own, nothing, nothing
            else:
                attention_s = tuple(x + t.attention_s for x, t in zip(own, traffic, strict=True))
                experts_s = tuple(
                    cost.seconds(*w) + t.experts_s for w, t in zip(work, traffic, strict=True)
                )
                transfer_s = tuple(t.transfer_s for t in traffic)
            times.append(
                LayerTimes(
                    num_layers=layer.num_layers,
                    attention_s=attention_s,
                    experts_s=experts_s,
                    transfer_s=transfer_s,
                )
            )
        return tuple(times)

    def colocated_time(self, load: BatchLoad) -> float:
        """See `StepCosts.colocated_time`."""
        if self.whole is not None:
            return self.whole.seconds(load, self.experts.num_activated(load.num_rows))
        total = sum(
            layer.num_layers
            * (
                layer.attention.seconds(load)
                + (
                    layer.experts.seconds(*self._expert_work(load.num_rows, _ALONE))
                    if layer.experts is not None
                    else 0.0
                )
            )
            for layer in self.layers
        )
        return total + self.fixed_seconds([load])

    def fixed_seconds(self, loads: Sequence[BatchLoad]) -> float:
        """Predicts the seconds of a step outside its layers, on the rank with the most
        sequences."""
        most = max([load.num_sequences for load in loads])
        return self.fixed.seconds(most) + self.sampling.seconds(most)

    def _expert_work(self, num_rows: float, ranks: Ranks) -> tuple[float, float]:
        """Predicts the choices and activated experts of the busiest expert rank."""
        share = ranks.imbalance / ranks.num_experts
        activated = self.experts.num_activated(num_rows) * share
        limit = -(-self.experts.num_experts // ranks.num_experts)
        return num_rows * self.experts.top_k * share, min(activated, limit)

    def _traffic(self, loads: Sequence[BatchLoad], ranks: Ranks) -> _Traffic:
        """Predicts one micro-batch's messages.

        Each pair of ranks has one message each way, with or without rows.
        """
        sent = self._share_sent(ranks)
        most, total = max(x.num_rows for x in loads), sum(x.num_rows for x in loads)
        value = _SUM_BYTES if ranks.num_experts == 1 else _PARTIAL_BYTES
        there = self.row_bytes + _CHOICE_BYTES * self.experts.top_k
        row = (there + self.width * value) / 2  # mean of both directions
        leaving, entering = most * sent * ranks.num_experts * row, total * sent * row
        a, e, link = ranks.num_attention, ranks.num_experts, self.link
        return _Traffic(
            transfer_s=link.transfer.seconds(HEADER_BYTES + max(leaving, entering)),
            attention_s=e * link.attention.alpha_s + leaving * link.attention.beta_s,
            experts_s=a * link.experts.alpha_s + entering * link.experts.beta_s,
        )

    def _share_sent(self, ranks: Ranks) -> float:
        """Returns the share of a rank's rows that a given expert rank receives: those with at least
        one of their k choices there.
        """
        if ranks.is_router_on_experts:
            return 1.0
        return float(1 - (1 - 1 / ranks.num_experts) ** self.experts.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """Seconds of a micro-batch's messages: travel time, and time on a rank's own cores."""

    transfer_s: float
    attention_s: float
    experts_s: float


_ALONE = Ranks(num_attention=1, num_experts=1)
