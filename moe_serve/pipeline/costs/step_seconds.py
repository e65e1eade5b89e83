"""Duration of a ping-pong step, computed from the times of its stages.

With T_a, T_e the times of a micro-batch's attention and expert stage, T_c that of one transfer, m
micro-batches and L layers, MegaScale-Infer (arXiv 2504.02263, eqs 1-5) gives

    (T_a + T_e + 2 T_c) + T_f (m L - 1)        T_f = max(T_a, T_e)

which holds while the pipeline is full, m T_f >= T_a + T_e + 2 T_c. Otherwise a micro-batch comes
back later than its turn, and a layer takes the whole round trip instead of m T_f:

    layer = max(m T_f, T_a + T_e + 2 T_c)
    step = (L - 1) layer + (T_a + T_e + 2 T_c) + (m - 1) T_f

Both agree where both hold; m = 1 gives L (T_a + T_e + 2 T_c). T_f also covers T_c, as a link sends
one message at a time. Time a rank itself spends on messages is part of its T_a or T_e.

`simulate_step` checks the closed formula by a discrete simulation. Every rank walks through the
same list of (layer, micro-batch) in the same order. An expert rank starts when the rows of all
attention ranks have arrived; an attention rank continues with a micro-batch when the sums of all
expert ranks have arrived. A rank's outgoing link carries one message at a time, in parallel with
the rank's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds by micro-batch, the same for each of some layers.

    A dense layer has zeros for experts and transfers.

    With several ranks the slowest one's times count, since a step runs in lockstep.
    """

    num_layers: int
    attention_s: tuple[float, ...]
    experts_s: tuple[float, ...]
    transfer_s: tuple[float, ...]  # one direction

    @property
    def cycle_s(self) -> float:
        """Seconds from the start of a layer to the start of the next one."""
        return max(
            sum(self.attention_s),
            sum(self.experts_s),
            sum(self.transfer_s),
            self.round_trip_s,
        )

    @property
    def round_trip_s(self) -> float:
        """The longest time of one micro-batch through a layer when it waits for no other
        micro-batch.
        """
        return max(
            a + e + 2 * c
            for a, e, c in zip(self.attention_s, self.experts_s, self.transfer_s, strict=True)
        )

    @property
    def last_s(self) -> float:
        """Seconds of the last layer, in which the pipeline drains."""
        trip = self.attention_s[0] + self.experts_s[0] + 2 * self.transfer_s[0]
        return trip + max(
            sum(self.attention_s[1:]),
            sum(self.experts_s[1:]),
            sum(self.transfer_s[1:]),
        )


def step_seconds(layers: Sequence[LayerTimes]) -> float:
    """Returns the seconds of a step's layers; schedule, head and sampling are not included."""
    last = layers[-1]
    return sum(layer.num_layers * layer.cycle_s for layer in layers) - last.cycle_s + last.last_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The times of one layer: seconds by rank and micro-batch, and of a one-way transfer by
    micro-batch.

    Without expert ranks the layer is dense and stays on the attention ranks.
    """

    attention_s: tuple[tuple[float, ...], ...]
    experts_s: tuple[tuple[float, ...], ...]
    transfer_s: tuple[float, ...]


class _SimulatedPool:
    """Ranks of one kind, with the times at which each is free to compute and to send."""

    def __init__(self, num_ranks: int) -> None:
        self._free_s = [0.0] * num_ranks
        self._link_free_s = [0.0] * num_ranks

    def run(self, work_s: Sequence[float], arrival_s: float, transfer_s: float) -> float:
        """Computes on all ranks and sends the results -> when the last of them has arrived."""
        done_s = 0.0
        for rank, seconds in enumerate(work_s):
            self._free_s[rank] = max(self._free_s[rank], arrival_s) + seconds
            begin_s = max(self._free_s[rank], self._link_free_s[rank])
            self._link_free_s[rank] = begin_s + transfer_s
            done_s = max(done_s, self._link_free_s[rank])
        return done_s


def simulate_step(layers: Sequence[LayerWork]) -> float:
    """Simulates a step -> seconds until the last micro-batch has left the last layer."""
    num_experts = max(len(layer.experts_s) for layer in layers)
    attention, experts = _SimulatedPool(len(layers[0].attention_s)), _SimulatedPool(num_experts)
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
    """Simulates a step as `simulate_step`, with every rank of a pool as slow as the slowest."""
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
