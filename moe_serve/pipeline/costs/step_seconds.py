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
    """Return the seconds of a step's layers; schedule, head and sampling are not included."""
    last = layers[-1]
    return sum(layer.num_layers * layer.cycle_s for layer in layers) - last.cycle_s + last.last_s
