"""The seconds of a step on published hardware. Each operation takes the longer of its arithmetic
and its traffic, each at a fitted share of the peak.

    op = max(FLOPs / (peak * share), bytes / (bandwidth * share)) + launch

Operations of a layer: the projections with the router and shared experts, attention over the cached
tokens, the routed experts, and the messages between devices. R rows, t shards of an attention rank,
H devices that hold experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from moe_kernels.graphs.graph_sizes import captured_rows
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepTiming
from moe_serve.pipeline.costs.step_seconds import LayerTimes, step_seconds
from moe_serve.simulate.costs.device import DeviceType
from moe_serve.simulate.costs.model_shape import KV_BYTES, LayerShape, ModelShape
from moe_serve.simulate.costs.routing_law import RoutingLaw
from moe_serve.simulate.layout import Layout

_ATTENTION_OPS = 8  # launches: norms, projections, rotation, attention, output, router, shared
_EXPERT_OPS = 4  # grouping, two grouped products, sum
_SUMS_SHARE = 0.8  # of a node's links in sums over shards: NCCL on A100 reaches 230-250 of 300 GB/s


class RooflineCosts:
    """Implements StepCosts for one cell of a layout on one kind of device.

    `forwards`: a row goes to every node once, over the network, and from there to the node's
    devices, as DeepEP sends it. Without, a row goes to every device by itself, as in moe-serve.
    `expands_latents`: prompts are read with the keys and values of every head, computed from the
    latents, where that is less work, as most engines do. moe-serve does not.
    """

    def __init__(
        self,
        model: ModelShape,
        device: DeviceType,
        layout: Layout,
        routing: RoutingLaw,
        *,
        forwards: bool = False,
        expands_latents: bool = False,
    ) -> None:
        self._expands_latents = expands_latents
        self._model, self._device, self._layout = model, device, layout
        self._forwards = forwards and layout.num_cell_devices > device.node_devices
        self._routing = routing
        self._imbalance = routing.imbalance(layout.num_holders, layout.num_redundant)
        own, peak = device.efficiency, device.flops_per_s(model.is_fp8)
        self._gemm = peak * own.gemm
        self._attention = device.flops_per_s(False) * own.attention
        self._launch_s = own.launch_us * 1e-6
        is_in_node = layout.num_cell_devices <= device.node_devices
        self._link = device.link_bytes_per_s(is_in_node)
        self._network = device.link_bytes_per_s(False)
        self._sums_link = device.node_link_gb_s * 1e9 * max(own.link, _SUMS_SHARE)
        self._latency_s = device.link_latency_us * 1e-6
        self._known_experts_s: dict[tuple[int, int], float] = {}  # see `_expert_seconds`

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def version(self) -> int:
        """Returns 0, as published figures do not change."""
        return 0

    def observe(self, loads: Sequence[BatchLoad], num_parts: int, timing: StepTiming) -> None:
        """Does nothing, as published figures do not learn."""

    def layer_times(
        self, micro_batches: Sequence[Sequence[BatchLoad]], ranks: Ranks
    ) -> tuple[LayerTimes, ...]:
        """See `StepCosts.layer_times`. Devices that have both stages spend both on the attention
        side, and only their messages overlap."""
        totals = [sum(load.num_rows for load in loads) for loads in micro_batches]
        if len(micro_batches) == 1:
            micro_batches = [[self._as_captured(load) for load in micro_batches[0]]]
        experts = tuple(
            self._known_expert_seconds(sum([load.num_rows for load in loads]), total)
            for loads, total in zip(micro_batches, totals, strict=True)
        )
        transfers = tuple(self._transfer_seconds(loads) for loads in micro_batches)
        nothing = (0.0,) * len(totals)
        different = [set(loads) if len(loads) > 2 else loads for loads in micro_batches]
        times = []
        for layer in self._model.layers:
            own = tuple(
                max([self._attention_seconds(layer, load) for load in loads]) for loads in different
            )
            if layer.is_sparse and not self._layout.is_split:
                own = tuple(a + e for a, e in zip(own, experts, strict=True))
            is_apart = layer.is_sparse and self._layout.is_split
            times.append(
                LayerTimes(
                    num_layers=layer.num_layers,
                    attention_s=own,
                    experts_s=experts if is_apart else nothing,
                    transfer_s=transfers if layer.is_sparse else nothing,
                )
            )
        return tuple(times)

    def colocated_time(self, load: BatchLoad) -> float:
        """See `StepCosts.colocated_time`. With several shards the experts are spread over them."""
        if self._layout.is_split or self._layout.num_attention > 1:
            times = self.layer_times([[load]], Ranks(num_attention=1, num_experts=1))
            return step_seconds(times) + self.fixed_seconds([load])
        # Without messages a layer is the sum of its stages: the same sums as above, in their order.
        captured = self._as_captured(load)
        experts_s = self._known_expert_seconds(captured.num_rows, load.num_rows)
        seconds, own_s = 0.0, 0.0
        for layer in self._model.layers:
            own_s = self._attention_seconds(layer, captured)
            own_s += experts_s if layer.is_sparse else 0.0
            seconds += layer.num_layers * own_s
        return seconds - own_s + own_s + self.fixed_seconds([load])

    def fixed_seconds(self, loads: Sequence[BatchLoad]) -> float:
        """Predicts the seconds of the head, on the rank with most sequences, and of the host."""
        most = max(load.num_sequences for load in loads)
        weights = self._model.head_weights / self._layout.num_shards
        flops = 2 * most * weights
        head_s = max(
            flops / (self._device.flops_per_s(False) * self._device.efficiency.gemm),
            weights * KV_BYTES / self._device.memory_bytes_per_s,
        )
        return head_s + self._launch_s + self._device.efficiency.host_ms * 1e-3

    def _as_captured(self, load: BatchLoad) -> BatchLoad:
        """Returns a decode step as its CUDA graph computes it. The rows that are added are copies
        of one row, so they read no more keys and activate no more experts."""
        rows = load.num_rows
        is_captured = self._device.has_graphs and not self._layout.is_split
        if not is_captured or not 0 < rows == load.num_sequences:
            return load
        more = captured_rows(rows)
        return (
            load
            if more == rows
            else replace(load, num_rows=more, num_pairs=load.num_pairs * more // rows)
        )

    def _attention_seconds(self, layer: LayerShape, load: BatchLoad) -> float:
        if not load.num_rows:
            return 0.0
        shards, model = self._layout.num_shards, self._model
        num_kv, num_pairs = load.num_kv_tokens, load.num_pairs
        if layer.window is not None:
            num_kv = min(num_kv, load.num_sequences * layer.window + load.num_rows)
            num_pairs = min(num_pairs, load.num_rows * layer.window)
        rows_bytes = 4 * load.num_rows * model.width * KV_BYTES
        weights = layer.num_weights / shards
        products_s = self._roof(
            2 * load.num_rows * weights / self._gemm, weights * model.weight_bytes + rows_bytes
        )
        kv_bytes = num_kv * layer.kv_values * KV_BYTES / min(shards, model.size.num_kv_parts)
        scores_s = self._roof(self._scores_seconds(layer, load, num_pairs) / shards, kv_bytes)
        launch_s = _ATTENTION_OPS * self._launch_s
        return products_s + scores_s + launch_s + self._reduce_seconds(load.num_rows)

    def _scores_seconds(self, layer: LayerShape, load: BatchLoad, num_pairs: int) -> float:
        """Predicts the arithmetic of attention over cached tokens, of all heads."""
        seconds = num_pairs * layer.pair_flops / self._attention
        if not self._expands_latents or layer.expanded is None:
            return seconds
        num_before = load.num_kv_tokens - load.num_rows  # the rows' own are among the products
        expanded_s = (
            num_pairs * layer.expanded.pair_flops / self._attention
            + num_before * layer.expanded.token_flops / self._gemm
        )
        return min(seconds, expanded_s)

    def _known_expert_seconds(self, num_rows: int, num_different: int) -> float:
        """Returns `_expert_seconds`, which decode steps need again and again for the same rows."""
        key = num_rows, num_different
        seconds = self._known_experts_s.get(key)
        if seconds is None:
            seconds = self._known_experts_s[key] = self._expert_seconds(*key)
        return seconds

    def _expert_seconds(self, num_rows: int, num_different: int) -> float:
        """Predicts the expert stage of the busiest device. `num_different`: rows without copies."""
        if not num_rows:
            return 0.0
        model, holders = self._model, self._layout.num_holders
        share = self._imbalance / holders
        choices = num_rows * model.top_k * share
        activated = min(
            self._routing.num_activated(num_different) * share,
            self._layout.num_held(model.num_experts),
        )
        row_bytes = 4 * choices * model.width * KV_BYTES
        seconds = self._roof(
            2 * choices * model.expert_weights / self._gemm,
            activated * model.expert_weights * model.weight_bytes + row_bytes,
        )
        return seconds + _EXPERT_OPS * self._launch_s

    def _transfer_seconds(self, loads: Sequence[BatchLoad]) -> float:
        """Predicts one direction of a micro-batch's messages: the mean of dispatch and combine.

        A row goes once to every device with at least one of its experts, 1 - (1 - 1/H)^k of them.
        """
        layout, model = self._layout, self._model
        if layout.num_attention == 1 and not layout.is_split:
            return 0.0  # shards have all rows: see `_reduce_seconds`
        holders = layout.num_holders
        sent = 1 - (1 - 1 / holders) ** model.top_k
        value_bytes = (model.weight_bytes + KV_BYTES) / 2
        most, total = max(x.num_rows for x in loads), sum(x.num_rows for x in loads)
        others = holders if layout.is_split else holders - 1
        leaving = most / layout.num_shards * sent * others
        entering = total * sent * self._imbalance
        if not layout.is_split:
            entering *= (holders - 1) / holders
        row_bytes = model.width * value_bytes
        if self._forwards:
            return self._forwarded_seconds(most / layout.num_shards, leaving, entering, row_bytes)
        return self._latency_s + max(leaving, entering) * row_bytes / self._link

    def _forwarded_seconds(
        self, num_rows: float, leaving: float, entering: float, row_bytes: float
    ) -> float:
        """Predicts messages that cross the network once for each node, and then a node's links.
        Both are busy at the same time."""
        num_nodes = -(-self._layout.num_cell_devices // self._device.node_devices)
        copies = (num_nodes - 1) * (1 - (1 - 1 / num_nodes) ** self._model.top_k)
        inside = self._device.link_bytes_per_s(True)
        network_s = num_rows * copies * row_bytes / self._link
        return 2 * self._latency_s + max(network_s, max(leaving, entering) * row_bytes / inside)

    def _reduce_seconds(self, num_rows: int) -> float:
        """Predicts the sums of a layer over the shards of a rank: two if the experts are spread
        over the same shards, else one.

        A node sums within itself, as a ring. Several nodes then sum their devices' parts as trees,
        up and down, over all their adapters, before a node collects the result.
        """
        layout = self._layout
        shards = layout.num_shards
        if shards == 1:
            return 0.0
        inside = min(shards, self._device.node_devices)
        num_nodes = -(-shards // inside)
        num_bytes = num_rows * self._model.width * KV_BYTES
        within_s = self._latency_s + _ring_share(inside) * num_bytes / self._sums_link
        between_s = 2 * math.log2(num_nodes) * self._latency_s
        between_s += _ring_share(num_nodes) * num_bytes / inside / self._network
        num_sums = 2 if layout.num_attention == 1 and not layout.is_split else 1
        return num_sums * (within_s + between_s)

    def _roof(self, arithmetic_s: float, num_bytes: float) -> float:
        return max(arithmetic_s, num_bytes / self._device.memory_bytes_per_s)


def _ring_share(count: int) -> float:
    """Returns the bytes that each of `count` ranks sends in a ring sum, over the bytes to sum."""
    return 2 * (count - 1) / count
