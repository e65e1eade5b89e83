"""Memory of this process that other processes of the same user and host open by a path."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray

from moe_serve.errors import ConfigError


class SharedMemory:
    """Anonymous memory. It is freed when the last process that has opened it closes it or ends."""

    def __init__(self, num_bytes: int, needed_by: str) -> None:
        """`needed_by` names the feature that needs it, as the beginning of a sentence. Raises
        ConfigError if the system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(f"{needed_by}, but this system has no memfd: it needs Linux.")
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create("moe-serve", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_bytes)

    @property
    def path(self) -> str:
        """The path by which processes of the same user and host open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def bytes(self) -> NDArray[np.uint8]:
        """Returns a mapping of the memory, which may outlive this object."""
        return np.frombuffer(mmap.mmap(self._descriptor, self.num_bytes), dtype=np.uint8)

    def slots(self, slot_bytes: int) -> NDArray[np.uint8]:
        """Returns the memory as slots of this size, [slots, bytes of a slot]."""
        return as_slots(self.bytes(), slot_bytes)

    def close(self) -> None:
        """Closes the memory here; processes that have opened it keep it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def open_memory(path: str) -> NDArray[np.uint8]:
    """Maps the memory of another process. Raises OSError, also for a path that is not such
    memory.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(descriptor, "r+b", buffering=0)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not memory")
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)


def as_slots(memory: NDArray[np.uint8], slot_bytes: int) -> NDArray[np.uint8]:
    """Divides memory into slots, [slots, bytes of a slot]. A remainder stays unused."""
    count = len(memory) // slot_bytes
    return memory[: count * slot_bytes].reshape(count, slot_bytes)
