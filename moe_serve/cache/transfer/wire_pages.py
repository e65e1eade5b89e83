"""The bytes of a page on its way to another rank, and the heads of the page that a shard holds.

    page on the wire | layer 0: keys, scales of keys, values, scales of values | layer 1 | ...
    one of these     | head 0 | head 1 | ...          a head: tokens x values

A head's bytes are those of the tensors. The page has each head once, however many shards hold
them, so ranks with different numbers of shards exchange pages. A head that several shards hold is
written by the first of them and read by all.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache

_FORMAT = 1  # change it when the order of the bytes changes


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of a cache, [pages, heads of the shard, tokens, width], and where its heads lie in
    a page on the wire. `rows`: its pages as bytes, [pages, bytes], if they are in main memory."""

    tensor: Tensor
    span: slice  # bytes
    rows: NDArray[np.uint8] | None


class WirePages:
    """Copies pages of one shard's cache to the wire's form, and back. Not for pages that a running
    step may write to. Pages in main memory may be copied on any thread."""

    def __init__(self, cache: KVCache, num_heads: int, shard: int = 0, num_shards: int = 1) -> None:
        """`num_heads`: key/value heads of the whole model, which the shards divide."""
        self._cache = cache
        divided = min(num_shards, num_heads)  # more shards than that hold copies
        group, held = shard * divided // num_shards, num_heads // divided
        self._is_first = shard == 0 or (shard - 1) * divided // num_shards != group
        self._pieces: list[_Piece] = []
        start, shapes = 0, []
        for part in cache.parts:
            own = part.shape[1]
            assert own == held or num_shards == 1, f"{own} heads of {num_heads}, shard {shard}"
            all_heads = num_heads if num_shards > 1 else own
            head_bytes = part[0, 0].nbytes
            first = start + group * own * head_bytes
            span = slice(first, first + own * head_bytes)
            self._pieces.append(_Piece(part, span, _rows(part)))
            shapes.append((all_heads, tuple(part.shape[2:]), str(part.dtype)))
            start += all_heads * head_bytes
        self.num_bytes = start  # of a whole page, all shards
        self.geometry = sha256(repr((_FORMAT, cache.page_size, shapes)).encode()).digest()

    @property
    def is_in_main_memory(self) -> bool:
        return self._cache.device.type == "cpu"

    def save(self, pages: Sequence[int], slots: Sequence[int], memory: NDArray[np.uint8]) -> None:
        """Copies this shard's heads of pages into slots of `memory`, [slots, num_bytes].

        Heads that an earlier shard holds as well are left to it.
        """
        if not self._is_first:
            return
        index = self._index(pages)
        for piece in self._pieces:
            if piece.rows is not None:
                for page, slot in zip(pages, slots, strict=True):
                    memory[slot, piece.span] = piece.rows[page]
            else:
                chosen = piece.tensor.index_select(0, index).flatten(1)
                memory[np.asarray(slots), piece.span] = chosen.view(torch.uint8).cpu().numpy()

    def load(self, pages: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Replaces this shard's heads of pages by those in `data`, [pages, num_bytes]."""
        assert data.shape == (len(pages), self.num_bytes), f"{data.shape} for {len(pages)} pages"
        index = self._index(pages)
        for piece in self._pieces:
            if piece.rows is not None:
                for page, row in zip(pages, data, strict=True):
                    piece.rows[page] = row[piece.span]
            else:
                tensor = piece.tensor
                part = torch.from_numpy(np.ascontiguousarray(data[:, piece.span]))
                part = part.view(tensor.dtype).view(len(pages), *tensor.shape[1:])
                tensor.index_copy_(0, index, part.to(tensor.device))

    def are_finite(self, pages: Sequence[int]) -> bool:
        return all(self._cache.finite(pages))

    def clear(self, pages: Sequence[int]) -> None:
        self._cache.clear(pages)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._cache.device)


def _rows(part: Tensor) -> NDArray[np.uint8] | None:
    if part.device.type != "cpu":
        return None
    rows: NDArray[np.uint8] = part.view(torch.uint8).view(len(part), -1).numpy()
    return rows


def checksum(slots: Sequence[int], memory: NDArray[np.uint8]) -> int:
    """Returns the CRC-32 of the slots' bytes, one after the other."""
    crc = 0
    for slot in slots:
        crc = zlib.crc32(memory[slot], crc)
    return crc
