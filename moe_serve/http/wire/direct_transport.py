"""A TCP transport that releases the GIL while the kernel takes the written data.

Writing to a socket is the longest part of sending a token; over loopback it includes the reader's
share of the work. uvloop holds the GIL meanwhile, and the engine's thread waits for it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any


class DirectTransport:
    """Wraps a transport and replaces `write`. Not for TLS, which encrypts the data first."""

    def __init__(self, wrapped: asyncio.Transport) -> None:
        self._wrapped = wrapped
        self._descriptor: int = wrapped.get_extra_info("socket").fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, data: bytes) -> None:
        """Writes directly; the wrapped transport handles the rest, and any error.

        A closing transport may already have released its descriptor.
        """
        wrapped = self._wrapped
        if wrapped.is_closing() or wrapped.get_write_buffer_size():
            wrapped.write(data)
            return
        try:
            num_taken = os.write(self._descriptor, data)
        except OSError:  # full or broken: the transport will see the same
            num_taken = 0
        if num_taken < len(data):
            wrapped.write(data[num_taken:])
