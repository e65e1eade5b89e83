"""Frame buffers, one for each peer and micro-batch, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from moe_serve.pipeline.links.transfer import Transfer

FrameT = TypeVar("FrameT")


class FramePool(Generic[FrameT]):
    """Keeps frames.

    `get` waits for a frame's last transfer and replaces a frame that is too small.
    """

    def __init__(self, make: Callable[[int], FrameT]) -> None:
        self._make = make  # makes a frame of a size in bytes
        self._frames: dict[tuple[str, int], tuple[int, FrameT]] = {}
        self._transfers: dict[tuple[str, int], Transfer] = {}

    def get(self, peer: str, micro_batch: int, size: int) -> FrameT:
        """Return a frame of at least `size` bytes that no transfer uses."""
        self.wait(peer, micro_batch)
        found = self._frames.get((peer, micro_batch))
        if found is None or found[0] < size:
            capacity = 1 << max(12, (size - 1).bit_length())
            found = (capacity, self._make(capacity))
            self._frames[peer, micro_batch] = found
        return found[1]

    def peek(self, peer: str, micro_batch: int) -> FrameT:
        """Return the frame without waiting or growing it."""
        return self._frames[peer, micro_batch][1]

    def use(self, peer: str, micro_batch: int, transfer: Transfer) -> None:
        """Note that a transfer has begun on the frame."""
        self._transfers[peer, micro_batch] = transfer

    def is_used(self, peer: str, micro_batch: int) -> bool:
        return (peer, micro_batch) in self._transfers

    def wait(self, peer: str, micro_batch: int) -> None:
        """Wait until the frame's transfer has ended; raises PeerLostError."""
        transfer = self._transfers.pop((peer, micro_batch), None)
        if transfer is not None:
            transfer.wait()

    def wait_all(self) -> None:
        for peer, micro_batch in list(self._transfers):
            self.wait(peer, micro_batch)

    def clear(self) -> None:
        """Forget all transfers, because their group is gone."""
        self._transfers.clear()
