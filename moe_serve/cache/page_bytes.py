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
        self._parts = [_as_bytes(part) for part in cache.parts]
        ends = np.cumsum([0, *(part.shape[1] for part in self._parts)]).tolist()
        self._spans = [slice(*ends) for ends in pairwise(ends)]
        self.num_bytes = int(ends[-1])
        self.geometry = page_geometry(cache)

    def read(self, page: int, into: NDArray[np.uint8]) -> None:
        """Copies a page's bytes, [num_bytes]."""
        np.concatenate([part[page] for part in self._parts], out=into)

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Replaces a page's content by `data`, [num_bytes]."""
        assert len(data) == self.num_bytes, f"{len(data)} bytes for a page of {self.num_bytes}"
        for part, span in zip(self._parts, self._spans, strict=True):
            part[page] = data[span]


def page_geometry(cache: KVCache) -> bytes:
    """Returns a digest of the shapes that the bytes of a page have."""
    shapes = [(tuple(part.shape[1:]), str(part.dtype)) for part in cache.parts]
    return sha256(repr((_FORMAT, cache.page_size, shapes)).encode()).digest()


def _as_bytes(part: Tensor) -> NDArray[np.uint8]:
    """Returns a view of pages [P, ...] as bytes [P, bytes of a page]."""
    assert part.is_contiguous(), "the pages of a cache are contiguous"
    view: NDArray[np.uint8] = part.view(torch.uint8).reshape(len(part), -1).numpy()
    return view
