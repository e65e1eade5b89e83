"""The memory that parcels of one host pass through, and what the ranks are told of it."""

from __future__ import annotations

from moe_serve.cache.transfer.parcel_memory import ParcelMemory
from moe_serve.cluster.control.parcel_messages import MemoryPath, ParcelSetup
from moe_serve.config.cells import CellsConfig


class LinkSetup:
    """Made before the ranks start: `setup` is a part of what they are told to load."""

    def __init__(self, config: CellsConfig) -> None:
        """Raises ConfigError where the system has no memory that processes share."""
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
        """Gives the memory up, once no rank will be started any more."""
        if self._memory is not None:
            self._memory.close()
