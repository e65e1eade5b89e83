"""The two ways to lay out an exchange in frames.

Compact: a rank gets the rows that chose one of its experts, and a rank without rows sends no
answer. This moves the fewest bytes. The rows and their number are known on the host only, which
waits for the device.

Masked: every rank gets all rows, with the choices of other ranks marked -1, and answers all of
them. Both sides know the frame sizes from the step's plan, so the host decides nothing during the
step and waits for nothing: a GPU with NCCL or a CUDA graph needs this.

`FramePool` keeps the buffers of the frames from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from experts.expert_stage import RoutedRows
from moe_serve.pipeline.exchange.row_split import RankRows, RowSplit
from moe_serve.pipeline.frames.frame_header import Exchange, HeaderLog, HostHeader
from moe_serve.pipeline.frames.frame_memory import direct_memory, staged_memory
from moe_serve.pipeline.frames.wire import CombineFrame, DispatchFrame
from moe_serve.pipeline.links.transfer import Transfer

FrameT = TypeVar("FrameT")


class FrameLayout(Protocol):
    """The frames of one rank."""

    device: torch.device
    is_fixed: bool  # every frame has the planned size, and every one is answered
    is_direct: bool  # frames are read and written in host memory, where the link uses them

    def split(self, split: RowSplit, layer: int, rows: RoutedRows) -> list[RankRows]:
        """Returns the rows that each expert rank gets."""
        ...

    def dispatch_frame(self, capacity: int) -> DispatchFrame: ...

    def combine_frame(self, capacity: int) -> CombineFrame: ...

    def begin(self, exchanges: Sequence[Exchange], num_peers: int) -> None:
        """Begins a step with these exchanges, each with at most `num_peers` peers."""
        ...

    def finish(self) -> None:
        """Ends a step whose frames have all arrived; raises WireError if one was wrong."""
        ...


class CompactLayout:
    """Implements FrameLayout with frames in host memory.

    `is_staged`: the rank computes in a device's memory.
    """

    is_fixed = False

    def __init__(self, device: torch.device, is_staged: bool | None = None) -> None:
        self.device = device
        self._is_staged = device.type != "cpu" if is_staged is None else is_staged
        self.is_direct = not self._is_staged

    def split(self, split: RowSplit, layer: int, rows: RoutedRows) -> list[RankRows]:
        return split.split(layer, rows)

    def dispatch_frame(self, capacity: int) -> DispatchFrame:
        memory = (staged_memory if self._is_staged else direct_memory)(capacity, self.device)
        return DispatchFrame(memory, HostHeader(memory.buffer))

    def combine_frame(self, capacity: int) -> CombineFrame:
        memory = (staged_memory if self._is_staged else direct_memory)(capacity, self.device)
        return CombineFrame(memory, HostHeader(memory.buffer))

    def begin(self, exchanges: Sequence[Exchange], num_peers: int) -> None:
        """Does nothing: every frame is checked when it arrives."""

    def finish(self) -> None:
        """Does nothing."""


class MaskedLayout:
    """Implements FrameLayout with frames in the device's memory."""

    is_fixed = True
    is_direct = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._headers = HeaderLog(device)

    def split(self, split: RowSplit, layer: int, rows: RoutedRows) -> list[RankRows]:
        return split.masked(layer, rows)

    def dispatch_frame(self, capacity: int) -> DispatchFrame:
        memory = direct_memory(capacity, self.device)
        return DispatchFrame(memory, self._headers.header(memory.buffer))

    def combine_frame(self, capacity: int) -> CombineFrame:
        memory = direct_memory(capacity, self.device)
        return CombineFrame(memory, self._headers.header(memory.buffer))

    def begin(self, exchanges: Sequence[Exchange], num_peers: int) -> None:
        self._headers.begin(exchanges, num_peers)

    def finish(self) -> None:
        self._headers.check()


class FramePool(Generic[FrameT]):
    """Keeps frames.

    `get` waits for a frame's last transfer and replaces a frame that is too small.
    """

    def __init__(self, make: Callable[[int], FrameT]) -> None:
        self._make = make  # makes a frame of a size in bytes
        self._frames: dict[tuple[str, int], tuple[int, FrameT]] = {}
        self._transfers: dict[tuple[str, int], Transfer] = {}

    def get(self, peer: str, micro_batch: int, size: int) -> FrameT:
        """Returns a frame of at least `size` bytes that no transfer uses."""
        self.wait(peer, micro_batch)
        found = self._frames.get((peer, micro_batch))
        if found is None or found[0] < size:
            capacity = 1 << max(12, (size - 1).bit_length())
            found = (capacity, self._make(capacity))
            self._frames[peer, micro_batch] = found
        return found[1]

    def peek(self, peer: str, micro_batch: int) -> FrameT:
        """Returns the frame without waiting or growing it."""
        return self._frames[peer, micro_batch][1]

    def use(self, peer: str, micro_batch: int, transfer: Transfer) -> None:
        """Notes that a transfer has begun on the frame."""
        self._transfers[peer, micro_batch] = transfer

    def is_used(self, peer: str, micro_batch: int) -> bool:
        return (peer, micro_batch) in self._transfers

    def wait(self, peer: str, micro_batch: int) -> None:
        """Waits until the frame's transfer has ended; raises PeerLostError."""
        transfer = self._transfers.pop((peer, micro_batch), None)
        if transfer is not None:
            transfer.wait()

    def drop(self, peer: str, micro_batch: int) -> None:
        """Forgets the frame's transfer after native code has finished it."""
        self._transfers.pop((peer, micro_batch), None)

    def wait_all(self) -> None:
        for peer, micro_batch in list(self._transfers):
            self.wait(peer, micro_batch)

    def clear(self) -> None:
        """Forgets all transfers, because their group is gone."""
        self._transfers.clear()
