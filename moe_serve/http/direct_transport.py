"""A transport of TCP that lets go of the interpreter while the kernel takes what is written.

A write to a socket is the longest part of sending a token, over loopback with the reader's share of
the work in it. uvloop holds the interpreter meanwhile, and the engine's thread waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
        if not wrapped.is_closing() and not wrapped.get_write_buffer_size():
            # Full, or broken: the transport sees the same, and knows what follows.
            with contextlib.suppress(OSError):
                data = data[os.write(self._descriptor, data) :]
        if data:
            wrapped.write(data)
