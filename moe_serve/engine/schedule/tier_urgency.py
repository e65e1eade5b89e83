"""Connects the scheduler's rule of order with the service tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.urgency import Urgency
from moe_serve.engine.service.preemption import Preemption
from moe_serve.engine.service.service_queue import ServiceQueue


class TierUrgency(Urgency):
    """The rule of a server with tiers. With the orders `edf` and `atc` the deadlines decide. With
    `fifo` and `priority` it is `Urgency`, and the tiers only count for reports."""

    def __init__(self, step_s: float, queue: ServiceQueue, preemption: Preemption) -> None:
        super().__init__(0.0 if queue.state.order_name == "fifo" else step_s)
        self._queue, self._preemption = queue, preemption
        self._has_levels = queue.state.order_name != "fifo"
        self.is_strict = not queue.is_ordered

    def level(self, sequence: Sequence) -> int:
        return sequence.request.priority if self._has_levels else 0

    def joined(self, sequence: Sequence) -> None:
        self._queue.joined(sequence)

    def left(self, sequence: Sequence) -> None:
        self._queue.left(sequence)

    def groups(
        self, line: Items[Sequence], levels: Collection[int], now: float
    ) -> Iterator[Items[Sequence]]:
        """See `Urgency.groups`. Groups of `edf` and `atc` are in the order of reading time."""
        if self.is_strict:
            return super().groups(line, levels, now)
        return self._queue.groups()

    def groups_before(self, until: float) -> Iterator[Items[Sequence]]:
        return self._queue.groups(until)

    def in_step(self, running: Items[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        decoding, reading = super().in_step(running)
        if not self.is_strict and len(reading) > 1:
            reading, _ = self._queue.reading_order(reading)
        return decoding, reading

    def victim(self, running: Items[Sequence]) -> Sequence:
        if self.is_strict:
            return super().victim(running)
        return self._preemption.for_pages(running)
