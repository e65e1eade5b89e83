"""A data group that notes when messages have come and gone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from moe_serve.pipeline.links.data_group import DataGroup
from moe_serve.pipeline.links.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _TimedReceive:
    """Implements Transfer."""

    inner: Transfer
    received: list[int]

    def wait(self) -> None:
        self.inner.wait()
        self.received.append(time.monotonic_ns())


class TimedGroup(DataGroup):
    """`received`, `sent`: times in ns, in the order of the exchanges."""

    received: list[int]
    sent: list[int]

    def forget(self) -> None:
        """A new step begins."""
        self.received, self.sent = [], []

    def send(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        transfer = super().send(peer, buffer, tag, operation)
        self.sent.append(time.monotonic_ns())
        return transfer

    def receive(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        return _TimedReceive(super().receive(peer, buffer, tag, operation), self.received)
