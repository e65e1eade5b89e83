"""Discrete simulation of a ping-pong step, used to check the closed formula.

Every rank walks through the same list of (layer, micro-batch) in the same order. An expert rank
starts when the rows of all attention ranks have arrived; an attention rank continues with a
micro-batch when the sums of all expert ranks have arrived. A rank's outgoing link carries one
message at a time, in parallel with the rank's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.pipeline.costs.step_seconds import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The times of one layer: seconds by rank and micro-batch, and of a one-way transfer by
    micro-batch.

    Without expert ranks the layer is dense and stays on the attention ranks.
    """

    attention_s: tuple[tuple[float, ...], ...]
    experts_s: tuple[tuple[float, ...], ...]
    transfer_s: tuple[float, ...]


class _Pool:
    """Ranks of one kind, with the times at which each is free to compute and to send."""

    def __init__(self, num_ranks: int) -> None:
        self._free_s = [0.0] * num_ranks
        self._link_free_s = [0.0] * num_ranks

    def run(self, work_s: Sequence[float], arrival_s: float, transfer_s: float) -> float:
        """Compute on all ranks and send the results -> when the last of them has arrived."""
        done_s = 0.0
        for rank, seconds in enumerate(work_s):
            self._free_s[rank] = max(self._free_s[rank], arrival_s) + seconds
            begin_s = max(self._free_s[rank], self._link_free_s[rank])
            self._link_free_s[rank] = begin_s + transfer_s
            done_s = max(done_s, self._link_free_s[rank])
        return done_s


def simulate_step(layers: Sequence[LayerWork]) -> float:
    """Simulate a step -> seconds until the last micro-batch has left the last layer."""
    num_experts = max(len(layer.experts_s) for layer in layers)
    attention, experts = _Pool(len(layers[0].attention_s)), _Pool(num_experts)
    back_s = [0.0] * len(layers[0].transfer_s)
    for layer in layers:
        for index, transfer_s in enumerate(layer.transfer_s):
            is_dense = not layer.experts_s
            arrival_s = attention.run(
                [rank[index] for rank in layer.attention_s],
                back_s[index],
                0.0 if is_dense else transfer_s,
            )
            if not is_dense:
                work_s = [rank[index] for rank in layer.experts_s]
                arrival_s = experts.run(work_s, arrival_s, transfer_s)
            back_s[index] = arrival_s
    return max(back_s)


def simulate_layers(
    layers: Sequence[LayerTimes], num_attention: int = 1, num_experts: int = 1
) -> float:
    """Simulate a step as `simulate_step`, with every rank of a pool as slow as the slowest."""
    work: list[LayerWork] = []
    for times in layers:
        is_dense = not any(times.experts_s)
        layer = LayerWork(
            attention_s=(times.attention_s,) * num_attention,
            experts_s=() if is_dense else (times.experts_s,) * num_experts,
            transfer_s=times.transfer_s,
        )
        work += [layer] * times.num_layers
    return simulate_step(work)
