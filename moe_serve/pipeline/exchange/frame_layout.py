"""Two ways to lay an exchange out in frames, and what the two sides must know of the difference.

Compact: a rank gets the rows that chose one of its experts, and no answer is due where there are
none. Fewest bytes; which rows, and how many, is known on the host, which waits for the device.

Masked: every rank gets all rows, with the choices of other ranks marked -1, and answers all of
them. Frames have the size that both sides know from the step's plan, so the host decides nothing on
the way and waits for nothing: what a GPU with NCCL, or a CUDA graph, needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from experts.routed_rows import RoutedRows
from moe_serve.pipeline.exchange.row_split import RankRows, RowSplit
from moe_serve.pipeline.frames.frame_header import Exchange, HeaderLog, HostHeader
from moe_serve.pipeline.frames.frame_memory import direct_memory, staged_memory
from moe_serve.pipeline.frames.wire import CombineFrame, DispatchFrame


class FrameLayout(Protocol):
    """One rank's frames."""

    device: torch.device
    is_fixed: bool  # every frame is as large as planned, and every one is answered

    def split(self, split: RowSplit, layer: int, rows: RoutedRows) -> list[RankRows]:
        """What each expert rank gets."""
        ...

    def dispatch_frame(self, capacity: int) -> DispatchFrame: ...

    def combine_frame(self, capacity: int) -> CombineFrame: ...

    def begin(self, exchanges: Sequence[Exchange], num_peers: int) -> None:
        """A step with these exchanges is about to begin, each with so many peers at most."""
        ...

    def finish(self) -> None:
        """The step's frames have all come; raises WireError if one was wrong."""
        ...


class CompactLayout:
    """Implements FrameLayout with frames in host memory. `is_staged`: the rank works elsewhere."""

    is_fixed = False

    def __init__(self, device: torch.device, is_staged: bool | None = None) -> None:
        self.device = device
        self._is_staged = device.type != "cpu" if is_staged is None else is_staged

    def split(self, split: RowSplit, layer: int, rows: RoutedRows) -> list[RankRows]:
        return split.split(layer, rows)

    def dispatch_frame(self, capacity: int) -> DispatchFrame:
        memory = (staged_memory if self._is_staged else direct_memory)(capacity, self.device)
        return DispatchFrame(memory, HostHeader(memory.buffer))

    def combine_frame(self, capacity: int) -> CombineFrame:
        memory = (staged_memory if self._is_staged else direct_memory)(capacity, self.device)
        return CombineFrame(memory, HostHeader(memory.buffer))

    def begin(self, exchanges: Sequence[Exchange], num_peers: int) -> None:
        """Nothing: every frame is checked when it comes."""

    def finish(self) -> None:
        """Nothing."""


class MaskedLayout:
    """Implements FrameLayout with frames in the device's memory."""

    is_fixed = True

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
