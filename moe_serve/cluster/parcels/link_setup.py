"""The memory through which parcels of one host travel, and the setup that ranks get for it."""

from __future__ import annotations

from moe_serve.cache.transfer.parcel_memory import ParcelMemory
from moe_serve.cluster.control.parcel_messages import MemoryPath, ParcelSetup
from moe_serve.config.cells import CellsConfig


class LinkSetup:
    """The memory and its setup. It is made before the ranks start, because `setup` is a part of the
    order that tells them what to load.
    """

    def __init__(self, config: CellsConfig) -> None:
        """Raises ConfigError if the system has no memory that processes share."""
        has_memory = config.link in ("auto", "shared")
        memory = ParcelMemory(config.memory_bytes) if has_memory else None
        self._memory = memory
        self.setup = ParcelSetup(
            num_bytes=config.memory_bytes,
            common=None if memory is None else MemoryPath(memory.path, memory.token),
            has_port=config.link in ("auto", "tcp"),
            has_agent=config.link == "nixl",
        )

    def close(self) -> None:
        """Releases the memory, once no further rank will be started."""
        if self._memory is not None:
            self._memory.close()
