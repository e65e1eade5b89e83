"""Tells the C library's allocator to keep freed memory that the server will soon use again.

glibc returns large blocks to the kernel as soon as they are free; the next step then takes them
page by page, each zeroed in a page fault. Tensors of a step (logits, activations) are such blocks:
keeping them made drawing 64 tokens from 4096 logits each 5 times faster (1.9 to 0.35 ms).
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 * 2**20  # bytes; glibc's maximum
_KEPT = 512 * 2**20  # bytes kept at the heap's end


def keep_freed_memory() -> bool:
    """Sets the allocator of this process. Returns False if the C library has no such settings
    (macOS, musl)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
