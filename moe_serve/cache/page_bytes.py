"""Copies whole KV pages out of a cache and back, as bytes.

The bytes of a page are those of the tensors, layer after layer: first the keys, then the values. A
page that is written back therefore has exactly the values that were read.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache

_FORMAT = 1  # change it when the order of the bytes changes


class PageBytes:
    """The bytes of a cache's pages. Not for pages that a running step may write to."""

    def __init__(self, cache: KVCache) -> None:
        self._parts = [_as_bytes(part) for part in cache.parts]
        self._ends = list(np.cumsum([part.shape[1] for part in self._parts]))
        self.num_bytes = int(self._ends[-1])
        shapes = [(tuple(part.shape[1:]), str(part.dtype)) for part in cache.parts]
        self.geometry = sha256(repr((_FORMAT, cache.page_size, shapes)).encode()).digest()

    def read(self, page: int) -> NDArray[np.uint8]:
        """Return a copy of a page's bytes, [num_bytes]."""
        return torch.cat([part[page] for part in self._parts]).cpu().numpy()

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Replace a page's content by `data`, [num_bytes]."""
        source, start = torch.from_numpy(data), 0
        assert len(source) == self.num_bytes, f"{len(source)} bytes for a page of {self.num_bytes}"
        for part, end in zip(self._parts, self._ends, strict=True):
            part[page].copy_(source[start:end])
            start = end


def _as_bytes(part: Tensor) -> Tensor:
    """View pages [P, ...] as bytes [P, bytes of a page]."""
    assert part.is_contiguous(), "the pages of a cache are contiguous"
    return part.view(torch.uint8).reshape(len(part), -1)
