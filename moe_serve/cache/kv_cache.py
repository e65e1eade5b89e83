"""The tensors behind the KV pages of one attention rank.

P pages (and the empty page 0), Hkv key/value heads, D head width; page size 16 tokens. A model
with latent attention has one "head", the latent with the shared key, and no values of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moe_kernels.kernels import KVPages
from moe_serve.config import PAGE_SIZE
from moe_serve.model.spec import ModelSpec


class KVCache:
    """Keys [P + 1, Hkv, 16, D] and values [P + 1, Hkv, 16, Dv] by layer, zeroed.

    Zeros matter: a page's tail is multiplied by probability 0, and 0 * NaN would be NaN. That is
    also why `clear` exists for pages that a failed request leaves.
    """

    def __init__(
        self, spec: ModelSpec, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages, self.num_kv_heads = num_pages, spec.attention.num_kv_heads
        self.layers = tuple(
            _zeroed_pages(spec, num_pages + 1, dtype, device) for _ in range(spec.num_layers)
        )

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

    def clear(self, pages: Sequence[int]) -> None:
        """Zero some pages in every layer."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.keys.index_fill_(0, index, 0)
            layer.values.index_fill_(0, index, 0)


def _zeroed_pages(
    spec: ModelSpec, num_pages: int, dtype: torch.dtype, device: torch.device
) -> KVPages:
    a = spec.attention
    shape = (num_pages, a.num_kv_heads, PAGE_SIZE)
    keys = torch.zeros((*shape, a.head_dim), dtype=dtype, device=device)
    if spec.latent is not None:
        return KVPages(keys, keys[..., : a.value_width])
    return KVPages(keys, torch.zeros((*shape, a.value_width), dtype=dtype, device=device))
