"""Copies whole KV pages out of a cache and back, as bytes.

The bytes of a page are those of the tensors, layer after layer: first the keys, then the values. A
page that is written back therefore has exactly the values that were read.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache

_FORMAT = 1  # change it when the order of the bytes changes


class PageBytes:
    """The bytes of a cache's pages in main memory. Not for pages that a running step may write
    to."""

    def __init__(self, cache: KVCache) -> None:
        assert cache.device.type == "cpu", f"the pages are on {cache.device}"
        parts = [_as_bytes(part) for part in cache.parts]
        ends = np.cumsum([0, *(part.shape[1] for part in parts)]).tolist()
        views = [part.reshape(-1).data for part in parts]
        self._parts = list(zip(views, pairwise(ends), strict=True))  # with their places in a page
        self.num_bytes = int(ends[-1])
        self.geometry = page_geometry(cache)

    def read(self, page: int, into: NDArray[np.uint8]) -> None:
        """Copies a page's bytes, [num_bytes]."""
        to = into.data  # views copy without releasing the interpreter's lock for each part
        for part, (start, end) in self._parts:
            size = end - start
            to[start:end] = part[page * size : (page + 1) * size]

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Replaces a page's content by `data`, [num_bytes]."""
        assert len(data) == self.num_bytes, f"{len(data)} bytes for a page of {self.num_bytes}"
        source = data.data
        for part, (start, end) in self._parts:
            size = end - start
            part[page * size : (page + 1) * size] = source[start:end]


def page_geometry(cache: KVCache) -> bytes:
    """Returns a digest of the shapes that the bytes of a page have."""
    shapes = [(tuple(part.shape[1:]), str(part.dtype)) for part in cache.parts]
    return sha256(repr((_FORMAT, cache.page_size, shapes)).encode()).digest()


def _as_bytes(part: Tensor) -> NDArray[np.uint8]:
    """Returns a view of pages [P, ...] as bytes [P, bytes of a page]."""
    assert part.is_contiguous(), "the pages of a cache are contiguous"
    view: NDArray[np.uint8] = part.view(torch.uint8).reshape(len(part), -1).numpy()
    return view
