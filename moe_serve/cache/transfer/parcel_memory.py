"""Slots that parcels pass through, in memory that the ranks of a host share.

    | token, 4 KiB | slot 0: one page on the wire | slot 1 | ...

The token proves that a path leads to this memory: the same path on another host may lead to
another file.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from moe_serve.cache.shared_memory import SharedMemory, open_memory
from moe_serve.errors import ConfigError

_HEAD_BYTES = 4096
_TOKEN_BYTES = 32


class ParcelMemory:
    """Memory for parcels, which other processes open by its path and token."""

    def __init__(self, num_bytes: int) -> None:
        """Raises ConfigError where the system has no such memory."""
        self.num_bytes, self.token = num_bytes, secrets.token_bytes(_TOKEN_BYTES)
        self._memory = SharedMemory(_HEAD_BYTES + num_bytes, "KV pages move between ranks")
        self._memory.bytes()[:_TOKEN_BYTES] = np.frombuffer(self.token, dtype=np.uint8)

    @property
    def path(self) -> str:
        return self._memory.path

    def close(self) -> None:
        self._memory.close()


def open_parcel_memory(path: str, token: bytes) -> NDArray[np.uint8]:
    """Returns the memory behind the token, to be divided by `as_slots`. Raises ConfigError."""
    try:
        memory = open_memory(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the memory of parcels cannot be opened: {why}.") from None
    if memory[:_TOKEN_BYTES].tobytes() != token:
        raise ConfigError(f"{path} is not the memory of parcels: it belongs to another host.")
    return memory[_HEAD_BYTES:]
