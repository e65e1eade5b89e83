"""Where the bytes of a frame lie: a link takes them from one place, the rank works in another.

On a CPU both are the same. A rank on a GPU whose link takes host memory packs a frame in the GPU's
memory and copies the used part over, and the other way round: one copy per frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.pipeline.frames.frame_header import HEADER_BYTES

_MAX_VIEWS = 256


class FrameMemory:
    """`buffer` travels; `work` is written and read by the rank. Headers stay in `buffer`.

    Steps repeat each other's sizes, so views are kept: making them anew took a tenth of the time
    of a small step."""

    def __init__(self, buffer: Tensor, work: Tensor) -> None:
        self.buffer, self.work = buffer, work  # uint8, of the same size
        self._sections: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._beginnings: dict[int, Tensor] = {}

    def section(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A part of `work` [rows, columns] that begins at a byte."""
        key = (offset, rows, columns, dtype)
        section = self._sections.get(key)
        if section is None:
            if len(self._sections) >= _MAX_VIEWS:
                self._sections.clear()
            size = rows * columns * dtype.itemsize
            section = self.work[offset : offset + size].view(dtype).view(rows, columns)
            self._sections[key] = section
        return section

    def first(self, size: int) -> Tensor:
        """The first bytes of `buffer`."""
        beginning = self._beginnings.get(size)
        if beginning is None:
            if len(self._beginnings) >= _MAX_VIEWS:
                self._beginnings.clear()
            beginning = self._beginnings[size] = self.buffer[:size]
        return beginning

    @property
    def is_staged(self) -> bool:
        return self.buffer is not self.work

    def to_send(self, end: int) -> Tensor:
        """The first bytes of `buffer`, with what was written. Staged: waits for the device."""
        if self.is_staged:
            start = HEADER_BYTES
            self.buffer[start:end].copy_(self.work[start:end], non_blocking=True)
            self.settle()
        return self.first(end)

    def received(self, end: int) -> None:
        """So many bytes came: from here on `work` has them, for what the device does next."""
        if self.is_staged:
            start = HEADER_BYTES
            self.work[start:end].copy_(self.buffer[start:end], non_blocking=True)

    def settle(self) -> None:
        """Until the device has done what it was told, copies of this frame among it."""
        if self.is_staged and self.work.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.work.device))
            event.synchronize()


def direct_memory(capacity: int, device: torch.device) -> FrameMemory:
    """Links take the device's memory."""
    buffer = torch.zeros(capacity, dtype=torch.uint8, device=device)
    return FrameMemory(buffer, buffer)


def staged_memory(capacity: int, device: torch.device) -> FrameMemory:
    """Links take host memory: pinned, if the device is a GPU."""
    is_cuda = device.type == "cuda"
    buffer = torch.zeros(capacity, dtype=torch.uint8, pin_memory=is_cuda)
    return FrameMemory(buffer, torch.zeros(capacity, dtype=torch.uint8, device=device))
