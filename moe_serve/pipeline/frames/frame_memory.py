"""Memory of a frame: the link uses one buffer, and the rank may work in another.

On a CPU both are the same. A rank on a GPU whose link uses host memory packs a frame in the GPU's
memory and copies the used part to the host, and the reverse for received frames: one copy per
frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.pipeline.frames.frame_header import HEADER_BYTES

_MAX_VIEWS = 256


class FrameMemory:
    """`buffer` is transferred; the rank reads and writes `work`. Headers stay in `buffer`.

    Steps use the same sizes again and again, so views are cached: creating them anew took a tenth
    of the time of a small step.
    """

    def __init__(self, buffer: Tensor, work: Tensor) -> None:
        self.buffer, self.work = buffer, work  # uint8, of the same size
        self.address: int = buffer.data_ptr()
        self._sections: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._beginnings: dict[int, Tensor] = {}

    def section(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns a part of `work` as [rows, columns], beginning at byte `offset`."""
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
        """Returns the first bytes of `buffer`."""
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
        """Returns the first bytes of `buffer` with everything written so far.

        If staged, waits for the device.
        """
        if self.is_staged:
            start = HEADER_BYTES
            self.buffer[start:end].copy_(self.work[start:end], non_blocking=True)
            self.settle()
        return self.first(end)

    def received(self, end: int) -> None:
        """Notes that `end` bytes arrived; the device's next work sees them in `work`."""
        if self.is_staged:
            start = HEADER_BYTES
            self.work[start:end].copy_(self.buffer[start:end], non_blocking=True)

    def settle(self) -> None:
        """Waits until the device has finished its queued work,
        which includes copies of this frame.
        """
        if self.is_staged and self.work.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.work.device))
            event.synchronize()


def direct_memory(capacity: int, device: torch.device) -> FrameMemory:
    """Makes a frame for links that use the device's memory."""
    buffer = torch.zeros(capacity, dtype=torch.uint8, device=device)
    return FrameMemory(buffer, buffer)


def staged_memory(capacity: int, device: torch.device) -> FrameMemory:
    """Makes a frame for links that use host memory, pinned if the device is a GPU."""
    is_cuda = device.type == "cuda"
    buffer = torch.zeros(capacity, dtype=torch.uint8, pin_memory=is_cuda)
    return FrameMemory(buffer, torch.zeros(capacity, dtype=torch.uint8, device=device))
