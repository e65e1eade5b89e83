"""The tensors behind the KV pages of one attention rank.

P pages (and the empty page 0), Hkv key/value heads, D head width; page size 16 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.config import PAGE_SIZE
from moe_serve.model.spec import ModelSpec


class KVCache:
    """Keys and values by layer, [P + 1, Hkv, 16, D] each, zeroed.

    Zeros matter: a page's tail is multiplied by probability 0, and 0 * NaN would be NaN. That is
    also why `clear` exists for pages that a failed request leaves.
    """

    def __init__(
        self, spec: ModelSpec, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        a = spec.attention
        shape = (num_pages + 1, a.num_kv_heads, PAGE_SIZE, a.head_dim)
        self.num_pages, self.num_kv_heads = num_pages, a.num_kv_heads
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]

    def rows(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]
    ) -> NDArray[np.int64]:
        """Where the new tokens' keys go, as rows of the cache seen as [(P + 1) * Hkv * 16, D].

        Sequence i writes positions [starts[i], starts[i] + counts[i]) -> [T * Hkv], token-major.
        """
        slots = []
        for table, start, count in zip(tables, starts, counts, strict=True):
            positions = np.arange(start, start + count)
            pages = np.asarray(table, dtype=np.int64)[positions // PAGE_SIZE]
            slots.append(pages * (self.num_kv_heads * PAGE_SIZE) + positions % PAGE_SIZE)
        heads = np.arange(self.num_kv_heads) * PAGE_SIZE
        rows: NDArray[np.int64] = (np.concatenate(slots)[:, None] + heads[None]).reshape(-1)
        return rows

    def write(self, layer: int, rows: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Store the new tokens' keys and values at `rows` (from `rows()`, on the device)."""
        width = k_THD.shape[-1]
        for cache, new in ((self.keys[layer], k_THD), (self.values[layer], v_THD)):
            cache.view(-1, width).index_copy_(0, rows, new.reshape(-1, width))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero some pages in every layer."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)
