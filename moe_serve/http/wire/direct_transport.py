"""A transport of TCP that lets go of the interpreter while the kernel takes what is written.

A write to a socket is the longest part of sending a token, over loopback with the reader's share of
the work in it. uvloop holds the interpreter meanwhile, and the engine's thread waits for it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any


class DirectTransport:
    """As the transport that it wraps, but for `write`. Not for TLS, whose bytes are others."""

    def __init__(self, wrapped: asyncio.Transport) -> None:
        self._wrapped = wrapped
        self._descriptor: int = wrapped.get_extra_info("socket").fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, data: bytes) -> None:
        """What the kernel does not take, and what is wrong, is the wrapped transport's to handle.

        A closing transport may have given its descriptor back.
        """
        wrapped = self._wrapped
        if wrapped.is_closing() or wrapped.get_write_buffer_size():
            wrapped.write(data)
            return
        try:
            num_taken = os.write(self._descriptor, data)
        except OSError:  # full, or broken: the transport will see the same
            num_taken = 0
        if num_taken < len(data):
            wrapped.write(data[num_taken:])
